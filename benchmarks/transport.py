"""How fast rows travel by NVSHMEM and by NCCL, and what they cost the matrix product beside them.

    torchrun --standalone --nproc_per_node=4 benchmarks/transport.py --output benchmarks/results/transport.json

Both are measured in one run, on the same tensors, through the interface that training uses. Two exchanges are under way
at a time, as in the ping-pong order. "wire" is the transfer alone (NVSHMEM: rows are in the peers' memory and the
receivers know it; NCCL: all-to-all of packed rows), "exchange" is everything from rows in their tensors on one rank to
rows in their tensors on another (packing, placing). Exchanges are timed in rows of 8 to 200 that last about 10 ms,
because links and clocks wake up during the first ones; "first 8" is the wire of 8 after a pause. "host_ahead" is false
where hosts were not ahead of the GPUs, so that the figure may be theirs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transport_inputs import MIB, ROW, busiest_bytes, expected, planned, uniform, without_kept
from transport_timing import beside_ms, steady, timed, wire

from distca.data.mixes import Mix
from distca.transport import Transport, gather_scatter
from distca.transport.collective import nccl_goes_first
from distca.transport.cuda_ops import row_bytes
from distca.transport.select import choose_transport
from distca.versions import command_line, header, write_report


def main() -> None:
    arguments = _arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    nccl_goes_first()
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    world = dist.group.WORLD
    assert world is not None, "it was just made"
    transports = {name: choose_transport(name, world, arguments.buffer_gb) for name in ("nvshmem", "nccl")}
    report = {
        **header(command_line(f"torchrun --nproc_per_node={world.size()} benchmarks/transport.py"), world.size()),
        "row_bytes": ROW,
        "sizes": [_size(transports, mib) for mib in arguments.sizes],
        "inside_one_gpu": _local(),
        "beside_gemm": _beside_gemm(transports, arguments.gemm, arguments.gemm_mib),
        "plans": [_plan(transports, mix, arguments.tokens) for mix in get_args(Mix)],
    }
    if dist.get_rank() == 0:
        write_report(arguments.output, report)
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
    part = uniform(mib * MIB // ROW)
    sent = peers * mib * MIB
    figures: dict[str, Any] = {"mib_per_peer": mib}
    for name, transport in transports.items():
        part.destination.zero_()
        alone = wire(transport, part)
        runs = {
            "exchange": steady(partial(transport.launch, (part,)), sent),
            "wire": steady(alone, sent),
            "first_8": timed(alone),
        }
        figures[name] = {f"{what}_gb_s": sent / run.seconds / 1e9 for what, run in runs.items()} | {
            "in_a_row": {what: run.in_a_row for what, run in runs.items()},
            "host_ahead": {what: run.host_ahead for what, run in runs.items()},
        }
        assert torch.equal(part.destination, expected(part)), f"rows did not arrive as they were sent: {name}"
    return figures


def _local() -> dict[str, float]:
    """TB/s, read and written, of what an exchange does on a GPU: moving rows by index, adding up four copies."""
    rows = 64 * 1024
    source = torch.randn(rows, ROW // 2, device="cuda").bfloat16()
    destination, index = torch.zeros_like(source), torch.randperm(rows, device="cuda")
    shared = torch.arange(rows // 4, device="cuda")
    borders = torch.arange(0, rows + 1, 4, device="cuda")
    moved = 2 * source.numel() * source.element_size()

    def rate(work: Callable[[], Any], moved: int) -> float:
        return moved / timed(lambda: _Done(work())).seconds / 1e12

    return {
        "copy by torch": rate(lambda: destination.copy_(source), moved),
        "gather and scatter": rate(lambda: gather_scatter.move_rows(source, index, destination, index), moved),
        "the same by torch": rate(lambda: destination.index_copy_(0, index, source.index_select(0, index)), moved),
        "sum of four": rate(
            lambda: gather_scatter.sum_rows(source, index, borders, [], destination, shared), moved // 2 + moved // 4
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
    part = uniform(mib * MIB // ROW // max(dist.get_world_size() - 1, 1))
    figures: dict[str, Any] = {"edge": edge, "mib_per_rank": mib}
    figures["alone_ms"] = beside_ms(lambda: None, lambda: torch.mm(a, b, out=out))
    for name, transport in transports.items():
        took = beside_ms(partial(transport.launch, (part,)), lambda: torch.mm(a, b, out=out))
        figures[name] = {"gemm_ms": took, "slowed": took / figures["alone_ms"]}
    return figures


def _plan(transports: dict[str, Transport], mix: Mix, tokens: int) -> dict[str, Any]:
    """Sending q and k,v of a planned nano-batch to the attention servers, as training does."""
    # Rows that stay on their rank cost both about the same: here only what travels counts.
    parts = tuple(without_kept(part) for part in planned(mix, tokens))
    widths = [row_bytes(part.source) for part in parts]
    sent = sum(sum(part.moves.send_counts) * width for part, width in zip(parts, widths, strict=True))
    segments = [len(ranges) for part in parts for ranges in part.moves.send_ranges.values()]
    busiest = busiest_bytes(parts)
    figures: dict[str, Any] = {
        "mix": mix,
        "tokens_per_rank": tokens,
        "busiest_rank_mib": busiest / MIB,
        "segments_of_rank_0": sum(segments),
        "mib_per_segment_of_rank_0": sent / MIB / max(sum(segments), 1),
    }
    for name, transport in transports.items():
        run = steady(partial(transport.launch, parts), busiest)
        figures[name] = {
            "ms": run.seconds * 1e3,
            "busiest_rank_gb_s": busiest / run.seconds / 1e9,
            "in_a_row": run.in_a_row,
            "host_ahead": run.host_ahead,
        }
    return figures


def _show(report: dict[str, Any]) -> None:
    table = Table(title=f"Rows between {report['hardware']}: GB/s that a rank sends")
    kinds = ("wire", "exchange", "first 8")
    for column in ("MiB per peer", *(f"{name} {kind}" for kind in kinds for name in ("NVSHMEM", "NCCL", "ratio of"))):
        table.add_column(column, justify="right")
    for line in report["sizes"]:
        cells = [str(line["mib_per_peer"])]
        for kind in (kind.replace(" ", "_") for kind in kinds):
            one, two = (line[name][f"{kind}_gb_s"] for name in ("nvshmem", "nccl"))
            late = ["" if line[name]["host_ahead"][kind] else "*" for name in ("nvshmem", "nccl")]
            cells += [f"{one:.4g}{late[0]}", f"{two:.4g}{late[1]}", f"{one / two:.3g}"]
        table.add_row(*cells)
    table.caption = "* The hosts were not ahead of the GPUs: the figure may be theirs."
    console = Console(width=160)
    console.print(table)
    console.print({key: report[key] for key in ("inside_one_gpu", "beside_gemm", "plans")})


if __name__ == "__main__":
    main()
