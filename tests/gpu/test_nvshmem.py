"""NVSHMEM on GPUs: the same rows as NCCL, bit for bit, with little memory, late ranks and a thousand random plans."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.plan import Plan, Tasks, lay_out, route
from distca.runtime import AttentionPool, NanoRoutes, run_layers
from distca.runtime.device_routes import ServerRoute
from distca.runtime.timeline import Timeline
from distca.testing.plans import random_plan
from distca.testing.ranks import run_ranks
from distca.testing.toy_layers import toy_layers
from distca.transport import Part, TransportError
from distca.transport.choose import choose_transport, why_not_nvshmem
from distca.transport.watchdog import EXIT_CODE

LENGTHS = ([4000, 37, 1, 1700, 9001], [12001], [1, 1, 1], [700] * 30, [1], [130] * 200)
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 8, 2, 64, 256

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and why_not_nvshmem() is not None, reason=f"no NVSHMEM: {why_not_nvshmem()}"
)
each_size = pytest.mark.parametrize("ranks", [2, 4])


def _ranks(ranks, function, *arguments):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    return run_ranks(ranks, function, *arguments, timeout=300, gpus=True)


def _transports(buffer_gb):
    world = dist.group.WORLD
    return choose_transport("nvshmem", world, buffer_gb), choose_transport("nccl", world)


def _choose_way(transport, number):
    """By copy engine or by kernel, in one stream or several: every rank decides for itself."""
    draw, writer = random.Random(1000 * number + dist.get_rank()), transport._fabric.writer
    writer.ways = replace(
        writer.ways,
        push_below_bytes=draw.choice((0, 1 << 18, 1 << 40)),
        push_below_bytes_per_range=0,
        push_blocks=draw.choice((1, 32, 96)),
        signal_after_bytes=draw.choice((0, 1 << 18, 1 << 40)),
        call=draw.choice(("range", "peer", "all")),
        streams=draw.choice((1, 2)),
        beside=draw.choice((False, True)),
        keep_from_bytes=draw.choice((0, 1 << 40)),
        keep_from_bytes_per_range=0,
    )


def _parts(moves, seed, dtypes):
    generator = torch.Generator("cuda").manual_seed(100 * seed + dist.get_rank())
    parts = []
    for each, (dtype, width) in zip(moves, dtypes, strict=True):
        source = torch.randn(each.source_rows, width, generator=generator, device="cuda").to(dtype)
        before = 0.0 if each.reduction is not None else 7.0
        parts.append(Part(source, torch.full((each.destination_rows, width), before, dtype=dtype, device="cuda"), each))
    return tuple(parts)


def _compare(buffer_gb, plans, late):
    """Exchanges of random plans in both directions, two under way at a time; counts tensors that differ."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nvshmem, nccl = _transports(buffer_gb)
    bf16, f32 = (torch.bfloat16, 1024), (torch.float32, 24)
    pending, differing = [], torch.zeros((), dtype=torch.int64, device="cuda")

    def finish(handle, parts, expected):
        if late == rank:
            torch.cuda._sleep(3_000_000)  # about 2 ms before this rank takes anything out
        handle.wait()
        for a, b in zip(parts, expected, strict=True):
            differing.add_((a.destination.view(torch.uint8) != b.destination.view(torch.uint8)).any())

    for number in range(plans):
        plan = random_plan(lay_out(LENGTHS[number % len(LENGTHS)], ranks)[0], number)
        routed = ServerRoute.of(route(plan, rank), "cuda")
        for moves, dtypes in (
            ((routed.q_to_server, routed.kv_to_server, routed.q_to_server), (bf16, bf16, f32)),
            ((routed.q_to_home, routed.kv_to_home), (bf16, bf16)),
            ((routed.kv_to_home,), (f32,)),
        ):
            expected, parts = (_parts(moves, number, dtypes) for _ in range(2))
            _choose_way(nvshmem, number)
            nccl.launch(expected).wait()
            pending.append((nvshmem.launch(parts), parts, expected))
            if len(pending) == 2:
                finish(*pending.pop(0))
    for each in pending:
        finish(*each)
    return int(differing)


@each_size
@pytest.mark.parametrize("late", [None, 1])
def test_the_same_rows_as_nccl(ranks, late):
    # Room for a few exchanges only: the ring goes round many times.
    assert _ranks(ranks, _compare, 0.25, 24, late) == [0] * ranks


def _train(steps, backward):
    """Toy layers over random plans of random sizes; returns each step's loss and gradient, and memory in use."""
    from distca.attention.flash4 import Flash4Kernel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = toy_layers(2, WIDTH, HEADS, KV_HEADS, HEAD_DIM, seed=3)
    for layer in layers:
        for name in ("qkv", "out"):
            weight = getattr(layer, name).detach().to("cuda", torch.bfloat16).requires_grad_()
            setattr(layer, name, weight)
    kernel, memory, results = Flash4Kernel(deterministic=True), [], {}
    nvshmem, nccl = _transports(0.25)
    for transport in (nvshmem, nccl):
        pool = AttentionPool(transport, kernel, Timeline("cuda"), backward)
        figures = []
        for step in range(steps):
            _choose_way(nvshmem, step)
            layouts = lay_out([int(x) for x in _lengths(step)], ranks, nano_batches=2)
            routes, previous, inputs = [], None, []
            for nano, layout in enumerate(layouts):
                forward = random_plan(layout, 7 * step + nano)
                back = random_plan(layout, 7 * step + nano + 3) if backward == "resend" else forward
                routes.append(NanoRoutes.of(forward, back, rank, "cuda", previous))
                previous = layout
                generator = torch.Generator("cuda").manual_seed(step + 10 * rank + nano)
                hidden = torch.randn(int(layout.q_rows[rank]), WIDTH, generator=generator, device="cuda")
                inputs.append(hidden.bfloat16().requires_grad_())
            loss = sum(out.float().square().sum() for out in run_layers(layers, inputs, routes, pool))
            loss.backward()
            pool.timeline.serve_seconds()
            with torch.no_grad():
                sums = [x.grad.float().abs().sum() for x in inputs]
                for layer in layers:
                    for weight in (layer.qkv, layer.out):
                        sums.append(weight.grad.float().abs().sum())
                        weight.grad = None
            figures.append(torch.stack([loss.detach(), *sums]))
            if step % 100 == 99 and transport.name == "nvshmem":
                memory.append(torch.cuda.memory_allocated())
        results[transport.name] = torch.stack(figures).cpu()
    return results, memory


def _lengths(step):
    draw = np.random.default_rng(step)
    return draw.integers(1, 1 + int(draw.integers(1, 1500)), size=int(draw.integers(1, 12)))


@each_size
@pytest.mark.parametrize("backward", ["keep", "resend"])
def test_layers_give_the_same_bits_as_over_nccl(ranks, backward):
    for results, _ in _ranks(ranks, _train, 12, backward):
        assert results["nvshmem"].isfinite().all() and results["nvshmem"].abs().sum() > 0
        assert torch.equal(results["nvshmem"], results["nccl"])


@each_size
def test_a_thousand_steps_leak_nothing(ranks):
    for results, memory in _ranks(ranks, _train, 1000, "keep"):
        assert torch.equal(results["nvshmem"], results["nccl"])
        assert len(memory) == 10 and memory[-1] <= memory[0]


def _push_more_than_one_launch_takes(pieces):
    """Rows of many widths by the kernel; returns how many arrived wrong."""
    from distca.transport.fabric import Put

    fabric = choose_transport("nvshmem", dist.group.WORLD, 0.04)._fabric
    fabric.writer.ways = replace(fabric.writer.ways, push_below_bytes=1 << 40)
    rank, place, puts = dist.get_rank(), 0, []
    for k in range(pieces):
        # Units of 16, 4 and 1 bytes, no rows, one row, rows out of order.
        rows, width = k % 7, (32, 12, 5, 16, 1, 4)[k % 6]
        source = (torch.arange(9 * width, device="cuda") + 3 * k).to(torch.uint8).view(9, width)
        index = torch.tensor([(3 * j + k) % 9 for j in range(rows)], dtype=torch.int64, device="cuda")
        ranges = np.array([[int(row), j, 1] for j, row in enumerate(index.tolist())] or [[0, 0, 0]], np.int64)
        puts.append((Put(source, ranges, index, place), source[index].flatten()))
        place += rows * width
    if rank == 0:
        sent = fabric.put(1, 0, {1: [put for put, _ in puts]})
        fabric.join(sent)
        torch.cuda.synchronize()
        return 0
    fabric.arrived(1, [0])
    return int((fabric.landing[:place] != torch.cat([rows for _, rows in puts])).sum())


def test_a_push_of_many_tensors_takes_several_launches():
    assert _ranks(2, _push_more_than_one_launch_takes, 150) == [0, 0]


def _keep(rows, below):
    """One rank keeps most of its rows: by copy engine or by kernel, in both directions, added to and not; and their
    memory is used again at once. Returns how many values are wrong, and whether the engine copied."""
    transport = choose_transport("nvshmem", dist.group.WORLD, 0.1)
    writer = transport._fabric.writer
    writer.ways = replace(writer.ways, keep_from_bytes=below, keep_from_bytes_per_range=0)
    rank = dist.get_rank()
    layout = lay_out([rows], 2, rank_of=[0])[0]
    # Rank 1 serves the end of the document; its keys and values come back from both, and are added up at home.
    plan = Plan(layout, Tasks.sorted(*np.array([[0, 0, rows - 8, 0], [0, rows - 8, rows, 1]]).T))
    routed = ServerRoute.of(route(plan, rank), "cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    kept = []
    for number in range(20):
        there, back = routed.kv_to_server, routed.kv_to_home
        source = torch.full((there.source_rows, 4096), float(number), device="cuda")
        server = torch.empty(there.destination_rows, 4096, device="cuda")
        handle = transport.launch((Part(source, server, there),))
        kept.append(handle._kept is not None)
        handle.wait()
        wrong += (server != number).sum()
        source.fill_(-1)
        home = torch.zeros(back.destination_rows, 4096, device="cuda")
        transport.launch((Part(server, home, back),)).wait()
        expected = torch.full((len(home), 1), 2.0 * number, device="cuda")
        expected[rows - 8 :] = number
        wrong += (home != expected).sum()
        del source, server, home
    return int(wrong), all(kept), any(kept)


@pytest.mark.parametrize("below", [0, 1 << 40])
def test_rows_that_stay(below):
    (wrong_0, all_0, any_0), (wrong_1, _, any_1) = _ranks(2, _keep, 5000, below)
    assert wrong_0 == wrong_1 == 0
    # Rank 1 keeps no row.
    assert (all_0, any_0, any_1) == ((True, True, False) if below == 0 else (False, False, False))


def _send_only(exchanges, below, credits):
    """Rank 0 gives all its rows to a late rank 1 and gets nothing back; returns how many values arrived wrong."""
    transport = choose_transport("nvshmem", dist.group.WORLD, 0.04)
    fabric = transport._fabric
    fabric.writer.ways = replace(fabric.writer.ways, push_below_bytes=below, push_below_bytes_per_range=0)
    if not credits:
        put = fabric.put
        fabric.put = lambda number, reuses, puts: put(number, 0, puts)
    plan = Plan(lay_out([1000], 2, rank_of=[0])[0], Tasks.sorted(*np.array([[0, 0, 1000, 1]]).T))
    moves = ServerRoute.of(route(plan, dist.get_rank()), "cuda").q_to_server  # 16 MB an exchange, 43 MB of memory
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(exchanges):
        source = torch.full((moves.source_rows, 4096), float(number), device="cuda")
        destination = torch.zeros(moves.destination_rows, 4096, device="cuda")
        handle = transport.launch((Part(source, destination, moves),))
        if dist.get_rank() == 1:
            torch.cuda._sleep(2_000_000)
        handle.wait()
        wrong += (destination != number).sum()
    return int(wrong)


@pytest.mark.parametrize("below", [0, 1 << 40])
def test_a_sender_waits_for_room(below):
    """By copy engine and by kernel; without the wait, rows that a late rank has yet to read are overwritten."""
    assert _ranks(2, _send_only, 30, below, True) == [0, 0]
    assert _ranks(2, _send_only, 30, below, False)[1] > 0


def _too_little():
    nvshmem, _ = _transports(0.001)
    routed = ServerRoute.of(route(random_plan(lay_out([40000], 2)[0], 1), dist.get_rank()), "cuda")
    try:
        nvshmem.launch(_parts((routed.kv_to_server,), 0, ((torch.bfloat16, 1024),)))
    except TransportError as error:
        return str(error)
    return ""


def test_too_little_memory_is_refused_alike_before_anything_is_sent():
    one, two = _ranks(2, _too_little)
    assert one == two
    assert one.startswith("EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB (cad.nvshmem_buffer_gb) gives 0.001 GiB")


KILLED = """
import os, signal, torch, torch.distributed as dist
from distca.transport.choose import choose_transport
torch.cuda.set_device(int(os.environ["RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
fabric = choose_transport("nvshmem", dist.group.WORLD, 0.1)._fabric
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
fabric.arrived(1, [1])
for _ in range(int(os.environ["QUEUED"])):
    torch.zeros(1, device="cuda").add_(1)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("queued", [0, 20_000])
def test_a_killed_rank_ends_who_waits_for_its_rows_and_is_named(queued):
    """Also when so much is queued behind the wait that the host is stuck as well."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29655",
        "QUEUED": str(queued),
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", KILLED], env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        assert ranks[1].wait(120) == -signal.SIGKILL
        began = time.monotonic()
        _, said = ranks[0].communicate(timeout=60)
        assert time.monotonic() - began < 60
    finally:
        for process in ranks:
            process.kill()
    assert ranks[0].returncode == EXIT_CODE
    assert "Rank 0 waits for rows of exchange 1 from rank 1, which has ended" in said.decode()
