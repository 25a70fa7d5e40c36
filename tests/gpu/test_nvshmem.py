"""NVSHMEM on GPUs: the same rows as NCCL, bit for bit, with little memory, late ranks and a thousand random plans."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from distca.cluster.failure_reports import EXIT_CODE
from distca.transport.select import why_not_nvshmem
from tests.gpu.nvshmem_cases import ENGINE, KERNEL, fill_little_memory, train_and_compare, treat_as_far
from tests.gpu.starts import Case

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        torch.cuda.is_available() and why_not_nvshmem() is not None, reason=f"no NVSHMEM: {why_not_nvshmem()}"
    ),
]

STARTS = {
    "trained 2": (1, 2, train_and_compare),
    "trained 4": (2, 4, train_and_compare),
    "little_memory 2": (1, 2, fill_little_memory),
    "far 01": (2, 2, treat_as_far, "01"),
    "far 0123": (4, 4, treat_as_far, "0123"),
    "far 0011": (4, 4, treat_as_far, "0011"),
}
"""Least GPUs, ranks, function and arguments, by the fixture that has the answers, and its parameter."""


def cases(_):
    """Each starts NVSHMEM in its own way."""
    return {
        name: Case(ranks, function, tuple(arguments), world=name, limit_s=600)
        for name, (gpus, ranks, function, *arguments) in STARTS.items()
        if torch.cuda.device_count() >= gpus
    }


def _answers(starts, name):
    gpus, *_ = STARTS[name]
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    return starts.result(name)


@pytest.fixture(params=[2, 4])
def trained(request, starts):
    """What each rank answered, by case."""
    return _answers(starts, f"trained {request.param}")


@pytest.fixture(params=[2])
def little_memory(request, starts):
    """What both ranks answered, by case."""
    found = _answers(starts, f"little_memory {request.param}")
    return {case: [answer[case] for answer in found] for case in found[0]}


@pytest.fixture(params=["01", "0123", "0011"])
def far(request, starts):
    """What each rank answered, by case, where the ranks are on these machines, as it were. NVSHMEM's own waits, which
    they use, are refused where ranks share a GPU."""
    return _answers(starts, f"far {request.param}")


@pytest.mark.parametrize("case", ["rows", "rows, one rank late"])
def test_the_same_rows_as_nccl_where_peers_are_far(far, case):
    assert [answer[case] for answer in far] == [0] * len(far)


def test_a_sender_waits_for_room_on_a_far_peer(far):
    if len(far) > 2:
        pytest.skip("a case of two ranks")
    assert [answer["sent"] for answer in far] == [0, 0]
    assert far[1]["sent without credits"] > 0


@pytest.mark.parametrize("case", ["rows", "rows, one rank late"])
def test_the_same_rows_as_nccl(trained, case):
    assert [answer[case] for answer in trained] == [0] * len(trained)


@pytest.mark.parametrize("backward", ["keep", "resend"])
def test_layers_give_the_same_bits_as_over_nccl(trained, backward):
    """A thousand steps where servers keep, a dozen where home ranks send again."""
    for answer in trained:
        results, _ = answer[backward]
        assert len(results["nvshmem"]) == {"keep": 1000, "resend": 12}[backward]
        assert results["nvshmem"].isfinite().all() and (results["nvshmem"].abs().sum(0) > 0).all()
        assert torch.equal(results["nvshmem"], results["nccl"])


def test_a_thousand_steps_leak_nothing(trained):
    for answer in trained:
        _, memory = answer["keep"]
        assert len(memory) == 10 and memory[-1] <= memory[0]


def test_a_push_of_many_tensors_takes_several_launches(little_memory):
    assert little_memory["pushed"] == [0, 0]


@pytest.mark.parametrize("below", [0, 1 << 40])
def test_rows_that_stay(little_memory, below):
    (wrong_0, all_0, any_0), (wrong_1, _, any_1) = (kept[below] for kept in little_memory["kept"])
    assert wrong_0 == wrong_1 == 0
    # Rank 1 keeps no row.
    assert (all_0, any_0, any_1) == ((True, True, False) if below == 0 else (False, False, False))


@pytest.mark.parametrize("below", [ENGINE, KERNEL])
def test_a_sender_waits_for_room(little_memory, below):
    """By copy engine and by kernel; without the wait, rows that a late rank has yet to read are overwritten."""
    assert [wrong[below] for wrong in little_memory["sent"]] == [0, 0]
    assert little_memory["sent without credits"][1][below] > 0


def test_what_does_not_fit_goes_by_nccl(little_memory):
    (wrong_0, by_fallback_0), (wrong_1, by_fallback_1) = little_memory["fallback_exchanges"]
    assert wrong_0 == wrong_1 == 0
    # Three exchanges of each plan.
    assert by_fallback_0 == by_fallback_1 and 0 < by_fallback_0 < 36


def test_too_little_memory_is_refused_alike_before_anything_is_sent(little_memory):
    """All other cases in little memory come after it, and need that nothing was sent or counted."""
    one, two = little_memory["refused"]
    assert one == two
    assert one.startswith("`nvshmem_buffer_gb` gives 0.04 GiB")


KILLED = """
import os, signal, torch, torch.distributed as dist
from distca.transport.select import choose_transport
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)
fabric = choose_transport("nvshmem", dist.group.WORLD, 0.1)._fabric
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
fabric.arrived(1, [1])
for _ in range(int(os.environ["QUEUED"])):
    torch.zeros(1, device="cuda").add_(1)
torch.cuda.synchronize()
"""


QUEUED = (0, 20_000)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Two ranks for each number of operations that are queued behind the wait, started at once."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    started = {}
    for queued in QUEUED:
        environment = os.environ | {"STORE": str(tmp_path_factory.mktemp("store") / "file"), "QUEUED": str(queued)}
        started[queued] = [
            subprocess.Popen(
                [sys.executable, "-c", KILLED], env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE
            )
            for rank in range(2)
        ]
    yield started
    for ranks in started.values():
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("queued", QUEUED)
def test_a_killed_rank_ends_who_waits_for_its_rows_and_is_named(killed, queued):
    """Also when so much is queued behind the wait that the host is stuck as well."""
    other, victim = killed[queued]
    assert victim.wait(200) == -signal.SIGKILL  # a busy machine starts slowly
    _, said = other.communicate(timeout=60)
    assert other.returncode == EXIT_CODE, said.decode()
    assert "Rank 0 waits for rows of exchange 1 from rank 1, which has ended" in said.decode()
