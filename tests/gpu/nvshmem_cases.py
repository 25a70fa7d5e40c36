"""What the ranks of test_nvshmem.py do: many cases in one start, because starting takes longer than they do."""

import gc
import random
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from distca.errors import TransportError
from distca.plan import AttentionKind, Links, Plan, Tasks, lay_out, route
from distca.runtime import AttentionPool, NanoRoutes, run_layers
from distca.runtime.device_routes import ServerRoute
from distca.runtime.timeline import Timeline
from distca.testing.plans import random_plan
from distca.transport import Part, select
from distca.transport.nvshmem.interface import Put
from distca.transport.nvshmem.intranode import CopyPolicy
from distca.transport.nvshmem.symmetric_memory import NvshmemFabric
from distca.transport.nvshmem.transport import OneSidedTransport
from distca.transport.select import choose_transport
from tests.runtime.toy_layers import toy_layers

KINDS = [AttentionKind(1.0)]

LENGTHS = ([4000, 37, 1, 1700, 9001], [12001], [1, 1, 1], [700] * 30, [1], [130] * 200)
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 8, 2, 64, 256
ENGINE, KERNEL = 0, 1 << 40  # limits below which a kernel writes


def train_and_compare():
    """Cases in 0.25 GiB: room for a few exchanges only, so that the ring goes round many times."""
    _let_ranks_share_gpus()
    transports = _transports()
    return {
        "rows": _compare(transports, 24, None),
        "rows, one rank late": _compare(transports, 24, 1),
        "keep": _train(1000, "keep"),
        "resend": _train(12, "resend"),
    }


def fill_little_memory():
    """Cases in 41 MiB, on two ranks."""
    _let_ranks_share_gpus()
    transport = choose_transport("nvshmem", dist.group.WORLD, 0.04)
    return {
        "refused": _too_little(transport),  # first: all others go on after it
        "pushed": _push_more_than_one_launch_takes(transport, 150),
        "kept": {below: _keep(transport, 1000, below) for below in (0, 1 << 40)},
        "sent": {below: _send_only(transport, 30, below, credits=True) for below in (ENGINE, KERNEL)},
        "sent without credits": {below: _send_only(transport, 30, below, credits=False) for below in (ENGINE, KERNEL)},
        "fallback_exchanges": _fallback(transport),
    }


def treat_as_far(machine_of):
    """Cases in 0.25 GiB where ranks of different numbers in ``machine_of`` use NVSHMEM's own calls among each other."""
    rank, world = dist.get_rank(), dist.group.WORLD
    far = [peer for peer, machine in enumerate(machine_of) if machine != machine_of[rank]]
    transport = OneSidedTransport(NvshmemFabric(world, 1 << 28, far), "nvshmem")
    transports, half = (transport, choose_transport("nccl", world)), transport._fabric._internode_peers._half
    answer = {"rows": _compare(transports, 12, None), "rows, one rank late": _compare(transports, 12, 1)}
    if len(machine_of) == 2:
        transport._fabric._internode_peers._half = half
        # So late that the sender is a round of the ring ahead.
        answer["sent"] = _send_only(transport, 60, ENGINE, credits=True, late=12_000_000)
        answer["sent without credits"] = _send_only(transport, 60, ENGINE, credits=False)
    # The last rows of a rank leave it after it has packed them.
    torch.cuda.synchronize()
    dist.barrier()
    return answer


def _let_ranks_share_gpus():
    """As if each rank had a GPU of its own. Within a node NVSHMEM only gives addresses, and it does so too where ranks
    share a GPU; of its calls, those that wait on a stream are refused there; only ranks of other nodes need those."""
    if torch.cuda.device_count() < dist.get_world_size():
        select._gpu = lambda _: f"of rank {dist.get_rank()}"


def _fallback(transport):
    """Exchanges of which some do not fit; returns tensors that differ, and how many exchanges went by NCCL."""
    nccl = choose_transport("nccl", dist.group.WORLD)
    transport.use_fallback(nccl)
    return _compare((transport, nccl), 12, None), transport.fallback_exchanges


def _transports():
    world = dist.group.WORLD
    return choose_transport("nvshmem", world, 0.25), choose_transport("nccl", world)


def _choose_way(transport, number):
    """By copy engine or by kernel, signalled together or not: every rank decides for itself."""
    draw = random.Random(1000 * number + dist.get_rank())
    if transport._fabric._internode_peers is not None:
        # Half of the staging memory: pieces go whole or in many loads.
        transport._fabric._internode_peers._half = draw.choice((1 << 16, 1 << 20, 1 << 25))
    transport._fabric.intranode.policy = CopyPolicy(
        push_below_bytes=draw.choice((ENGINE, 1 << 18, KERNEL)),
        push_below_bytes_per_range=0,
        push_blocks=draw.choice((1, 32, 96)),
        signal_after_bytes=draw.choice((0, 1 << 18, 1 << 40)),
        keep_from_bytes=draw.choice((0, 1 << 40)),
        keep_from_bytes_per_range=0,
    )
    transport.waits_at_once = draw.choice((False, True))


def _parts(moves, seed, dtypes):
    generator = torch.Generator("cuda").manual_seed(100 * seed + dist.get_rank())
    parts = []
    for each, (dtype, width) in zip(moves, dtypes, strict=True):
        source = torch.randn(each.source_rows, width, generator=generator, device="cuda").to(dtype)
        before = 0.0 if each.reduction is not None else 7.0
        parts.append(Part(source, torch.full((each.destination_rows, width), before, dtype=dtype, device="cuda"), each))
    return tuple(parts)


def _compare(transports, plans, late):
    """Exchanges of random plans in both directions, two under way at a time; counts tensors that differ."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nvshmem, nccl = transports
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
        routed = ServerRoute.of(route(plan, rank, Links(2)), KINDS, "cuda")  # with four ranks some rows take two hops
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


def _train(steps, backward):
    """Toy layers over random plans of random sizes, every step over both transports.

    Returns:
        By transport: [steps, 7] each step's loss and sums of gradients; and bytes in use after every hundredth step.
    """
    from distca.attention.flash4 import Flash4Kernel

    layers = toy_layers(2, WIDTH, HEADS, KV_HEADS, HEAD_DIM, seed=3)
    for layer in layers:
        for name in ("qkv", "out"):
            weight = getattr(layer, name).detach().to("cuda", torch.bfloat16).requires_grad_()
            setattr(layer, name, weight)
    kernel, transports, memory = Flash4Kernel(deterministic=True), _transports(), []
    pools = [AttentionPool(transport, kernel, Timeline("cuda"), backward) for transport in transports]
    results = {transport.name: torch.zeros(steps, 7, device="cuda") for transport in transports}
    for step in range(steps):
        _choose_way(transports[0], step)
        routes, inputs = _routes_and_inputs(step, backward)
        for pool in pools:
            results[pool.transport.name][step] = _step(layers, inputs, routes, pool)
            if step % 10 == 9:
                pool.timeline.serve_seconds()  # waits for the GPU; in between the host runs ahead
        del routes, inputs
        if step % 100 == 99:
            gc.collect()
            memory.append(torch.cuda.memory_allocated())
    return {name: figures.cpu() for name, figures in results.items()}, memory


def _routes_and_inputs(step, backward):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    routes, previous, inputs = [], None, []
    for nano, layout in enumerate(lay_out([int(x) for x in _lengths(step)], ranks, nano_batches=2)):
        forward = random_plan(layout, 7 * step + nano)
        back = random_plan(layout, 7 * step + nano + 3) if backward == "resend" else forward
        routes.append(NanoRoutes.of(forward, back, rank, KINDS, "cuda", previous, Links(2)))
        previous = layout
        generator = torch.Generator("cuda").manual_seed(step + 10 * rank + nano)
        hidden = torch.randn(int(layout.q_rows[rank]), WIDTH, generator=generator, device="cuda")
        inputs.append(hidden.bfloat16().requires_grad_())
    return routes, inputs


def _lengths(step):
    draw = np.random.default_rng(step)
    return draw.integers(1, 1 + int(draw.integers(1, 1500)), size=int(draw.integers(1, 12)))


def _step(layers, inputs, routes, pool):
    """[7] loss, and sums of the gradients of inputs and weights, which are forgotten."""
    loss = sum(out.float().square().sum() for out in run_layers(layers, inputs, [tuple(routes)] * len(layers), pool))
    loss.backward()
    leaves = [*inputs, *(weight for layer in layers for weight in (layer.qkv, layer.out))]
    sums = [leaf.grad.float().abs().sum() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return torch.stack([loss.detach(), *sums])


def _too_little(transport):
    """What an exchange that needs more memory than there is says."""
    routed = ServerRoute.of(route(random_plan(lay_out([40000], 2)[0], 1), dist.get_rank()), KINDS, "cuda")
    try:
        transport.launch(_parts((routed.kv_to_server,), 0, ((torch.float32, 2048),)))
    except TransportError as error:
        return str(error)
    return ""


def _push_more_than_one_launch_takes(transport, pieces):
    """Rows of many widths by the kernel; returns how many bytes arrived wrong."""
    fabric, place, made = transport._fabric, 0, []
    fabric.intranode.policy = CopyPolicy(push_below_bytes=KERNEL)
    for k in range(pieces):
        # Units of 16, 4 and 1 bytes, no rows, one row, rows out of order.
        rows, width = k % 7, (32, 12, 5, 16, 1, 4)[k % 6]
        source = (torch.arange(9 * width, device="cuda") + 3 * k).to(torch.uint8).view(9, width)
        index = torch.tensor([(3 * j + k) % 9 for j in range(rows)], dtype=torch.int64, device="cuda")
        ranges = np.array([[int(row), j, 1] for j, row in enumerate(index.tolist())] or [[0, 0, 0]], np.int64)
        made.append((Put(source, ranges, index, place), source[index].flatten()))
        place += rows * width
    landing, wrong = transport._ring.place((place,)), 0
    if dist.get_rank() == 0:
        puts = [replace(put, begin=landing.begin + put.begin) for put, _ in made]
        fabric.join(fabric.put(landing.number, landing.reuses, {1: puts}))
    else:
        fabric.arrived(landing.number, [0])
        expected = torch.cat([rows for _, rows in made])
        wrong = int((fabric.receive_buffer[landing.begin : landing.begin + place] != expected).sum())
    fabric.consumed(transport._ring.consumed(landing.number))
    torch.cuda.synchronize()
    return wrong


def _keep(transport, rows, below):
    """One rank keeps most of its rows: by copy engine or by kernel, in both directions, added to and not; and their
    memory is used again at once. Returns how many values are wrong, and whether the engine copied always or ever."""
    transport._fabric.intranode.policy = CopyPolicy(keep_from_bytes=below, keep_from_bytes_per_range=0)
    layout = lay_out([rows], 2, rank_of=[0])[0]
    # Rank 1 serves the end of the document; its keys and values come back from both, and are added up at home.
    plan = Plan(layout, Tasks.sorted(*np.array([[0, 0, rows - 8, 0], [0, rows - 8, rows, 1]]).T))
    routed = ServerRoute.of(route(plan, dist.get_rank()), KINDS, "cuda")
    there, back = routed.kv_to_server, routed.kv_to_home
    wrong, by_engine = torch.zeros((), dtype=torch.int64, device="cuda"), []
    for number in range(20):
        source = torch.full((there.source_rows, 4096), float(number), device="cuda")
        server = torch.empty(there.destination_rows, 4096, device="cuda")
        handle = transport.launch((Part(source, server, there),))
        by_engine.append(handle._kept is not None)
        handle.wait()
        wrong += (server != number).sum()
        source.fill_(-1)
        home = torch.zeros(back.destination_rows, 4096, device="cuda")
        transport.launch((Part(server, home, back),)).wait()
        expected = torch.full((len(home), 1), 2.0 * number, device="cuda")
        expected[rows - 8 :] = number
        wrong += (home != expected).sum()
        del source, server, home
    return int(wrong), all(by_engine), any(by_engine)


def _send_only(transport, exchanges, below, credits, late=2_000_000):
    """Rank 0 gives all its rows to rank 1, and gets nothing back; returns how many values arrived wrong.

    With ``credits`` rank 0 waits for room, and rank 1 is ``late`` (in clock cycles) with each exchange. Without, rank 1
    reads nothing before rank 0 has written all exchanges, and each overwrites earlier ones."""
    fabric, rank = transport._fabric, dist.get_rank()
    fabric.intranode.policy = CopyPolicy(push_below_bytes=below, push_below_bytes_per_range=0)
    plan = Plan(lay_out([1000], 2, rank_of=[0])[0], Tasks.sorted(*np.array([[0, 0, 1000, 1]]).T))
    moves = ServerRoute.of(route(plan, rank), KINDS, "cuda").q_to_server  # 16 MB an exchange, 43 MB of memory
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    put = fabric.put
    if not credits:
        fabric.put = lambda number, reuses, puts: put(number, 0, puts)
    torch.cuda.synchronize()
    dist.barrier()
    for number in range(exchanges):
        source = torch.full((moves.source_rows, 4096), float(number), device="cuda")
        destination = torch.zeros(moves.destination_rows, 4096, device="cuda")
        handle = transport.launch((Part(source, destination, moves),))
        if rank == 1 and credits:
            torch.cuda._sleep(late)
        if rank == 1 and not credits and number == 0:
            dist.barrier()
        handle.wait()
        wrong += (destination != number).sum()
    fabric.put = put
    torch.cuda.synchronize()
    if rank == 0 and not credits:
        dist.barrier()
    return int(wrong)
