"""What speaks against NVSHMEM is said in a sentence, the same on every rank, and rows go another way."""

import logging
import logging.handlers

import pytest
import torch
import torch.distributed as dist

from distca.commands import doctor_transport
from distca.commands.doctor_transport import transport_rows
from distca.errors import TransportError
from distca.testing.ranks import run_ranks
from distca.transport import cuda_ops, select


def _why_not(machines, asked, linked):
    """As if every rank had a GPU and NVSHMEM, on these machines; whether GPUs of one machine reach each other."""
    rank = dist.get_rank()
    select.why_not_nvshmem = lambda: None
    select.machine_name = lambda: machines[rank]
    select._gpu = lambda index: f"GPU {rank if index == 'mine' else index}"
    torch.cuda.current_device = lambda: "mine"
    torch.cuda.device_count = lambda: len(machines)
    torch.cuda.can_device_access_peer = lambda a, b: linked
    dist.get_backend = lambda group: "nccl"
    return select.why_not_nvshmem_together(dist.group.WORLD, between_nodes=asked)


def test_ranks_on_several_machines_use_nccl_unless_nvshmem_is_asked_for():
    said = (
        "the server pool spans 2 nodes, and between nodes rows go by NCCL, because NVSHMEM has not been measured "
        "on a network; set `transport` to nvshmem to use NVSHMEM there"
    )
    assert run_ranks(2, _why_not, ["one", "two"], False, False) == [said, said]
    assert run_ranks(2, _why_not, ["one", "two"], True, False) == [None, None]


def test_gpus_of_one_machine_must_reach_each_other():
    said = ["GPU 0 has no peer access to GPU 1"] * 3
    assert run_ranks(3, _why_not, ["one", "one", "two"], True, False) == said
    assert run_ranks(2, _why_not, ["one", "one"], False, True) == [None, None]


def _why_not_after(failed, started):
    """As if NVSHMEM had failed, or runs, over other ranks, of which the first rank was none."""
    if dist.get_rank() == 1:
        select._failed[:], select._started = failed, dict.fromkeys(started)
    return _why_not(["one", "one"], False, True)


@pytest.mark.parametrize(
    "failed, started, said",
    [
        (["on rank 2, it does not start: no memory"], [], "on rank 2, it does not start: no memory"),
        ([], [(1, 2)], "NVSHMEM runs over ranks (1, 2) already, and starts only once in a process"),
        ([], [(0, 1)], None),
    ],
)
def test_ranks_that_were_in_different_pools_get_the_same_answer(failed, started, said):
    assert run_ranks(2, _why_not_after, failed, started) == [said, said]


def test_doctor_says_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for finding in ("_driver", "_peer_access", "_nvlink"):
        monkeypatch.setattr(f"distca.commands.doctor_transport.{finding}", str)
    monkeypatch.setattr(cuda_ops, "why_not", lambda: None)
    assert dict(transport_rows())["several machines"].startswith(select.BETWEEN_NODES)


def test_doctor_names_what_nvshmem_has_for_networks(monkeypatch):
    files = ["nvidia/nvshmem/lib/libnvshmem_host.so.3", "nvidia/nvshmem/lib/nvshmem_transport_ibrc.so.3"]
    monkeypatch.setattr(doctor_transport.metadata, "files", lambda package: files if package.endswith("13") else None)
    assert doctor_transport._remote_transports() == "NVSHMEM has libraries for ibrc"


class _Library:
    def __init__(self, can_signal):
        self.distca_can_signal = lambda: can_signal


def test_a_library_without_a_gpu_is_not_used(monkeypatch):
    monkeypatch.setattr(cuda_ops, "_library", lambda: _Library(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_ops.why_not.__wrapped__() == "torch finds no GPU here"


@pytest.mark.parametrize("can_signal", [0, 1])
def test_a_gpu_whose_streams_cannot_signal_is_refused(monkeypatch, can_signal):
    monkeypatch.setattr(cuda_ops, "why_not", lambda: None)
    monkeypatch.setattr(cuda_ops, "_library", lambda: _Library(can_signal))
    monkeypatch.setattr(cuda_ops, "why_no_signals", cuda_ops.why_no_signals.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = "streams of this GPU, under this driver, cannot write and wait for 64-bit words in memory"
    assert (cuda_ops.why_no_signals() == said) == (select.why_not_nvshmem() == said) == (can_signal == 0)


def _does_not_start(name):
    """As if the GPUs were fine and NVSHMEM failed on the second rank only, twice."""
    select.why_not_nvshmem_together = lambda group, between_nodes: select._failed[0] if select._failed else None

    def start(*_):
        if dist.get_rank() == 1:
            raise RuntimeError("no such device\nand a trace")
        return object()

    select._nvshmem_transport = start
    said = []
    for _ in range(2):
        try:
            said.append(select.choose_transport(name, dist.group.WORLD).name)
        except TransportError as error:
            said.append(str(error))
    return said


def test_another_transport_is_taken_where_nvshmem_does_not_start():
    assert run_ranks(2, _does_not_start, "auto") == [["gloo", "gloo"]] * 2
    refused = (
        "`transport` nvshmem cannot be used here: on rank 1, it does not start: no such device. Set `transport` to "
        "auto to take another."
    )
    assert run_ranks(2, _does_not_start, "nvshmem") == [[refused, refused]] * 2


def _fails_alone():
    """The first rank waits inside NVSHMEM, for the second one; what that one says."""
    if dist.get_rank() == 0:
        return ""
    select.why_not_nvshmem_together = lambda group, between_nodes: None
    select._ALONE_S = 0.5

    def start(*_):
        raise RuntimeError("no memory")

    select._nvshmem_transport = start
    try:
        return select.choose_transport("auto", dist.group.WORLD).name
    except TransportError as error:
        return str(error)


def test_a_rank_that_fails_alone_does_not_wait_for_those_who_wait_for_it():
    assert run_ranks(2, _fails_alone)[1] == (
        "NVSHMEM does not start on rank 1: no memory. Other ranks wait inside NVSHMEM for this rank, so they cannot "
        "take another transport. Set `transport` to nccl."
    )


class _Started:
    """In place of NVSHMEM's transport."""

    name, ranks = "nvshmem", 2

    def for_another(self, fallback, waits_at_once):
        return self


def _twice(name):
    """Warnings when a process asks for as much memory again, and then for more."""
    select.why_not_nvshmem_together = lambda group, between_nodes: None
    select._nvshmem_transport = lambda *_: _Started()
    handler = logging.handlers.BufferingHandler(99)
    logging.getLogger("distca.transport.select").addHandler(handler)
    assert select.choose_transport(name, dist.group.WORLD, 0).name == "gloo"  # no rows travel
    first, *others = [select.choose_transport(name, dist.group.WORLD, gb) for gb in (0.5, 0.5, 2.0)]
    assert first.name == "nvshmem"
    assert all(other is first for other in others)
    return [record.getMessage() for record in handler.buffer if record.levelno == logging.WARNING]


@pytest.mark.parametrize("name, others", [("auto", "go by gloo"), ("nvshmem", "are refused")])
def test_more_memory_than_a_process_has_is_warned_of(name, others):
    said = (
        "NVSHMEM started with 0.5 GiB of symmetric memory per rank; 2 GiB are asked for now, but a process cannot get "
        f"more after the start. Exchanges that do not fit {others}. Set the larger size before NVSHMEM starts."
    )
    assert run_ranks(2, _twice, name) == [[said]] * 2
