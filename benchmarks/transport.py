"""How fast rows travel by NVSHMEM and by NCCL, and what they cost the matrix product beside them.

    torchrun --standalone --nproc_per_node=4 benchmarks/transport.py --output benchmarks/results/transport.json

Both in one run, on the same tensors, through the interface that training uses, with two exchanges under way at a time
as in the ping-pong order. "wire" is the transfer alone (NVSHMEM: rows are in the peers' memory and the receivers know
it; NCCL: all-to-all of packed rows), "exchange" is everything from rows in their tensors on one rank to rows in their
tensors on another (packing, placing).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from distca.commands.versions import hardware, versions
from distca.data.mixes import Mix, sample_long_context
from distca.plan.cost import analytic_cost
from distca.plan.micro_batch import plan_micro_batch
from distca.runtime import NanoRoutes
from distca.transport import Part, RowMoves, Transport, row_kernels
from distca.transport.choose import choose_transport
from distca.transport.one_sided import OneSidedTransport

ROW = 4096  # bytes: the k,v rows of 8 heads, 128 wide, in bfloat16
MIB = 2**20
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def main() -> None:
    arguments = _arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    world = dist.group.WORLD
    transports = {name: choose_transport(name, world, arguments.buffer_gb) for name in ("nvshmem", "nccl")}
    report = {
        "command": shlex.join(
            ["torchrun", f"--nproc_per_node={dist.get_world_size()}", "benchmarks/transport.py", *sys.argv[1:]]
        ),
        "hardware": hardware(dist.get_world_size()),
        "versions": versions(),
        "row_bytes": ROW,
        "sizes": [_size(transports, mib) for mib in arguments.sizes],
        "inside_one_gpu": _local(),
        "beside_gemm": _beside_gemm(transports, arguments.gemm, arguments.gemm_mib),
        "plans": [_plan(transports, mix, arguments.tokens) for mix in get_args(Mix)],
    }
    if dist.get_rank() == 0:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        _show(report)
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="MiB for each peer")
    parser.add_argument("--gemm", type=int, default=8192, help="edge of the square matrices")
    parser.add_argument("--gemm-mib", type=int, default=256, help="MiB that each rank sends beside the matrix product")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens per rank of the plans; also the context")
    parser.add_argument("--buffer-gb", type=float, default=6.0, help="GiB of symmetric memory per rank")
    return parser.parse_args()


def _size(transports: dict[str, Transport], mib: int) -> dict[str, Any]:
    """GB/s that a rank sends when every rank sends ``mib`` MiB to every other."""
    peers = dist.get_world_size() - 1
    source, destination, moves = _uniform(mib * MIB // ROW)
    sent = peers * mib * MIB
    figures: dict[str, Any] = {"mib_per_peer": mib}
    part = Part(source, destination, moves)
    for name, transport in transports.items():
        exchange = _median_seconds(lambda transport=transport: transport.launch((part,)))
        figures[name] = {"exchange_gb_s": sent / exchange / 1e9, "wire_gb_s": sent / _wire(transport, part) / 1e9}
    # Which of its two ways of writing is faster at this size?
    one_sided = transports["nvshmem"]
    assert isinstance(one_sided, OneSidedTransport)
    fabric: Any = one_sided._fabric
    usual = fabric.push_below_bytes
    for way, below in (("copy engine", 0), ("kernel", 1 << 40)):
        fabric.push_below_bytes = below
        figures["nvshmem"][f"wire_gb_s by {way}"] = sent / _wire(one_sided, part) / 1e9
    fabric.push_below_bytes = usual
    assert torch.equal(destination, _expected(source, moves)), "rows did not arrive as they were sent"
    return figures


def _wire(transport: Transport, part: Part) -> float:
    """Seconds of the transfer alone."""
    if isinstance(transport, OneSidedTransport):
        return _median_seconds(lambda: _Unplaced(transport, part))
    sent = part.source.index_select(0, part.moves.send_index)
    received = part.destination.new_empty((sum(part.moves.receive_counts), *part.destination.shape[1:]))
    counts = part.moves.receive_counts, part.moves.send_counts
    return _median_seconds(lambda: dist.all_to_all_single(received, sent, *counts, async_op=True))


class _Unplaced:
    """A one-sided exchange up to the arrival of its rows, by the transport's own steps."""

    def __init__(self, transport: OneSidedTransport, part: Part) -> None:
        self._transport, self._counts = transport, part.moves.receive_counts
        self._landing = transport._ring.place((part.moves.most_received * ROW,))
        puts = transport._puts((part,), self._landing)
        self._token = transport._fabric.put(self._landing.number, self._landing.reuses, puts)

    def wait(self) -> None:
        fabric, number = self._transport._fabric, self._landing.number
        fabric.arrived(number, [peer for peer, rows in enumerate(self._counts) if rows])
        fabric.taken(self._transport._ring.taken(number))
        fabric.join(self._token)


def _local(rows: int = 64 * 1024) -> dict[str, float]:
    """TB/s, read and written, of what an exchange does on a GPU: moving rows by index, adding up four copies."""
    source = torch.randn(rows, ROW // 2, device="cuda").bfloat16()
    destination, index = torch.zeros_like(source), torch.randperm(rows, device="cuda")
    shared = torch.arange(rows // 4, device="cuda")
    borders = torch.arange(0, rows + 1, 4, device="cuda")
    moved = 2 * source.numel() * source.element_size()

    def rate(work: Callable[[], Any], moved: int) -> float:
        return moved / _median_seconds(lambda: _Done(work())) / 1e12

    return {
        "copy by torch": rate(lambda: destination.copy_(source), moved),
        "gather and scatter": rate(lambda: row_kernels.move_rows(source, index, destination, index), moved),
        "the same by torch": rate(lambda: destination.index_copy_(0, index, source.index_select(0, index)), moved),
        "sum of four": rate(
            lambda: row_kernels.sum_rows(source, index, borders, [], destination, shared), moved // 2 + moved // 4
        ),
    }


class _Done:
    """Something that needs no waiting for."""

    def __init__(self, _: Any) -> None: ...

    def wait(self) -> None: ...


def _beside_gemm(transports: dict[str, Transport], edge: int, mib: int) -> dict[str, Any]:
    """Milliseconds of a bfloat16 matrix product alone, and while each rank sends ``mib`` MiB in all."""
    a, b = (torch.randn(edge, edge, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    source, destination, moves = _uniform(mib * MIB // ROW // max(dist.get_world_size() - 1, 1))
    figures: dict[str, Any] = {"edge": edge, "mib_per_rank": mib}
    figures["alone_ms"] = _gemm_ms(lambda: None, lambda: torch.mm(a, b, out=out))
    for name, transport in transports.items():
        took = _gemm_ms(
            lambda transport=transport: transport.launch((Part(source, destination, moves),)),
            lambda: torch.mm(a, b, out=out),
        )
        figures[name] = {"gemm_ms": took, "slowed": took / figures["alone_ms"]}
    return figures


def _gemm_ms(launch: Callable[[], Any], gemm: Callable[[], Any], repeats: int = 30) -> float:
    """Median of the largest over ranks."""
    times = []
    for _ in range(repeats + 5):
        dist.barrier(device_ids=[torch.cuda.current_device()])
        gemm()  # so that the host is ahead of the GPU when the transfer starts
        handle = launch()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        gemm()
        end.record()
        if handle is not None:
            handle.wait()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return _largest(statistics.median(times[5:]))


def _plan(transports: dict[str, Transport], mix: Mix, tokens: int) -> dict[str, Any]:
    """Sending q and k,v of a planned nano-batch to the attention servers, as training does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cost = analytic_cost(HEADS, KV_HEADS, HEAD_DIM)
    lengths = sample_long_context(mix, tokens * ranks, tokens, seed=1)
    plan = plan_micro_batch(lengths, ranks, cost)
    nano = plan.nano_batches[0]
    routes = NanoRoutes.of(nano.forward, nano.backward, rank, "cuda").forward
    kinds = ((routes.q_to_server, (HEADS, HEAD_DIM)), (routes.kv_to_server, (2, KV_HEADS, HEAD_DIM)))
    parts = tuple(
        Part(
            torch.randn(moves.source_rows, *shape, device="cuda").bfloat16(),
            torch.empty(moves.destination_rows, *shape, device="cuda", dtype=torch.bfloat16),
            # Rows that stay on their rank are copied all the same by both: here only what travels counts.
            replace(moves, keep_source=moves.keep_source[:0], keep_destination=moves.keep_destination[:0]),
        )
        for moves, shape in kinds
    )
    row_bytes = [part.source.shape[1:].numel() * part.source.element_size() for part in parts]
    sent = sum(sum(part.moves.send_counts) * width for part, width in zip(parts, row_bytes, strict=True))
    received = sum(sum(part.moves.receive_counts) * width for part, width in zip(parts, row_bytes, strict=True))
    segments = [len(ranges) for part in parts for ranges in part.moves.send_ranges.values()]
    busiest = _largest(max(sent, received))
    figures: dict[str, Any] = {
        "mix": mix,
        "tokens_per_rank": tokens,
        "busiest_rank_mib": busiest / MIB,
        "segments_of_rank_0": sum(segments),
        "mib_per_segment_of_rank_0": sent / MIB / max(sum(segments), 1),
    }
    for name, transport in transports.items():
        seconds = _median_seconds(lambda transport=transport: transport.launch(parts))
        figures[name] = {"ms": seconds * 1e3, "busiest_rank_gb_s": busiest / seconds / 1e9}
    return figures


def _uniform(rows: int) -> tuple[torch.Tensor, torch.Tensor, RowMoves]:
    """Every rank sends ``rows`` rows of its own to every other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = [rows * (peer != rank) for peer in range(ranks)]
    total, nothing = sum(counts), torch.empty(0, dtype=torch.int64, device="cuda")
    begins = np.cumsum(counts) - counts
    everything = torch.arange(total, device="cuda")
    moves = RowMoves(
        source_rows=total,
        destination_rows=total,
        send_counts=counts,
        receive_counts=counts,
        send_index=everything,
        receive_index=everything,
        send_ranges={
            peer: np.array([[begins[peer], (rank - (rank > peer)) * rows, rows]], np.int64)
            for peer in range(ranks)
            if peer != rank
        },
        most_received=total,
        keep_source=nothing,
        keep_destination=nothing,
        reduction=None,
        travelling=total * ranks,
    )
    source = torch.randn(total, ROW // 2, device="cuda").bfloat16()
    return source, torch.zeros_like(source), moves


def _expected(source: torch.Tensor, moves: RowMoves) -> torch.Tensor:
    received = torch.empty_like(source)
    dist.all_to_all_single(received, source, moves.receive_counts, moves.send_counts)
    return received


def _median_seconds(launch: Callable[[], Any], repeats: int = 15, in_a_row: int = 8) -> float:
    """Seconds of one of several exchanges in a row, two of them under way at a time: median over repetitions of the
    largest over ranks. A sleeping kernel lets the host run ahead, as it does in training."""
    times = []
    for _ in range(repeats + 3):
        dist.barrier(device_ids=[torch.cuda.current_device()])
        torch.cuda._sleep(8_000_000)  # about 4 ms
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        under_way = launch()
        for _ in range(in_a_row - 1):
            following = launch()
            under_way.wait()
            under_way = following
        under_way.wait()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / in_a_row)
    return _largest(statistics.median(times[3:]))


def _largest(value: float) -> float:
    box = torch.tensor(value, dtype=torch.float64, device="cuda")
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def _show(report: dict[str, Any]) -> None:
    table = Table(title=f"Rows between {report['hardware']}: GB/s that a rank sends")
    for column in ("MiB per peer", "NVSHMEM wire", "NCCL wire", "ratio", "NVSHMEM exchange", "NCCL exchange"):
        table.add_column(column, justify="right")
    for line in report["sizes"]:
        one, two = line["nvshmem"], line["nccl"]
        cells = [one["wire_gb_s"], two["wire_gb_s"], one["wire_gb_s"] / two["wire_gb_s"]]
        cells += [one["exchange_gb_s"], two["exchange_gb_s"]]
        table.add_row(str(line["mib_per_peer"]), *(f"{cell:.4g}" for cell in cells))
    console = Console()
    console.print(table)
    console.print({key: report[key] for key in ("inside_one_gpu", "beside_gemm", "plans")})


if __name__ == "__main__":
    main()
