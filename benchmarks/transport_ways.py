"""Which way of writing rows by NVSHMEM is fastest, and what each costs the matrix product beside it.

Part of transport.py, with --ways. What is measured here decides the defaults of
distca.transport.nvshmem.intranode.Ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transport_inputs import MIB, ROW, busiest_bytes, expected, planned, uniform, without_kept
from transport_timing import beside_ms, steady, wire

from distca.data.mixes import Mix
from distca.transport.cuda_ops import row_bytes
from distca.transport.nvshmem.transport import OneSidedTransport

_ALWAYS = {"push_below_bytes": 1 << 40}
WAYS: dict[str, dict[str, Any]] = {
    "usual": {},
    "signals after each peer": {"signal_after_bytes": 0},
    "engine": {"push_below_bytes": 0, "push_below_bytes_per_range": 0},
    "kernel, 32 blocks": _ALWAYS | {"push_blocks": 32},
    "kernel, 96 blocks": _ALWAYS | {"push_blocks": 96},
}
KEEPING: dict[str, dict[str, Any]] = {
    "kernel": {"keep_from_bytes": 1 << 40},
    "engine": {"keep_from_bytes": 0, "keep_from_bytes_per_range": 0},
}
_ROUNDS = 2


def compare(transport: OneSidedTransport, sizes: list[int], edge: int, mib: int, tokens: int) -> dict[str, Any]:
    """GB/s that a rank sends by every way at every size, the slowing of a matrix product, and two ways of copying rows
    that stay.

    Args:
        transport: over NVSHMEM.
        sizes: MiB for each peer.
        edge: of the square matrices.
        mib: MiB that each rank sends beside the matrix product.
        tokens: per rank of the plans.
    """
    gemm = _gemm(edge)
    alone = beside_ms(lambda: None, gemm)
    return {
        "wire_gb_s": {str(size): _at_size(transport, size) for size in sizes},
        "gemm": {"edge": edge, "mib_per_rank": mib, "alone_ms": alone},
        "gemm_slowed": _slowed(transport, gemm, mib, alone),
        "kept": [_kept(transport, mix, tokens, gemm) for mix in get_args(Mix)],
    }


def _at_size(transport: OneSidedTransport, mib: int) -> dict[str, float]:
    part, sent = uniform(mib * MIB // ROW), (dist.get_world_size() - 1) * mib * MIB
    rates = dict.fromkeys(WAYS, 0.0)
    # In turn, so that a clock that drifts meets all of them.
    for _ in range(_ROUNDS):
        for name, way in WAYS.items():
            with _taking(transport, way):
                rates[name] = max(rates[name], sent / steady(wire(transport, part), sent, repeats=3).seconds / 1e9)
    for name, way in WAYS.items():
        part.destination.zero_()
        with _taking(transport, way):
            transport.launch((part,)).wait()
        assert torch.equal(part.destination, expected(part)), f"rows did not arrive as they were sent: {name}"
    return rates


def _slowed(transport: OneSidedTransport, gemm: Callable[[], Any], mib: int, alone: float) -> dict[str, float]:
    part = uniform(mib * MIB // ROW // max(dist.get_world_size() - 1, 1))
    slowed = {}
    for name, way in WAYS.items():
        with _taking(transport, way):
            slowed[name] = beside_ms(partial(transport.launch, (part,)), gemm) / alone
    return slowed


def _kept(transport: OneSidedTransport, mix: Mix, tokens: int, gemm: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of an exchange of a plan's rows, and of four matrix products with the whole exchange beside them, if
    rows that stay are copied by kernel, by engine, or not at all."""
    parts = planned(mix, tokens)
    moving = tuple(without_kept(part) for part in parts)
    busiest = busiest_bytes(parts)
    kept = sum(len(part.moves.keep_source) * row_bytes(part.source) for part in parts)

    def computed() -> None:
        for _ in range(4):
            gemm()

    figures: dict[str, Any] = {"mix": mix, "kept_mib_of_rank_0": kept / MIB}
    figures["gemms_alone_ms"] = beside_ms(lambda: None, computed)
    for name, way, mine in (("no rows kept", {}, moving), *((name, way, parts) for name, way in KEEPING.items())):
        with _taking(transport, way):
            launch = partial(transport.launch, mine)
            figures[name] = {
                "exchange_ms": steady(launch, busiest).seconds * 1e3,
                "beside_gemms_ms": beside_ms(launch, computed, all_of_it=True),
            }
    return figures


def _gemm(edge: int) -> Callable[[], Any]:
    a, b = (torch.randn(edge, edge, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


@contextmanager
def _taking(transport: OneSidedTransport, way: dict[str, Any]) -> Iterator[None]:
    fabric: Any = transport._fabric
    usual = fabric.near.ways
    fabric.near.ways = replace(usual, **way)
    try:
        yield
    finally:
        fabric.near.ways = usual


def show(ways: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table(title="GB/s that a rank sends, by MiB for each peer; a matrix product's time beside it, over alone")
    for column in ("way", *ways["wire_gb_s"], "GEMM"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name in WAYS:
        rates = [f"{rates[name]:.0f}" for rates in ways["wire_gb_s"].values()]
        table.add_row(name, *rates, f"{ways['gemm_slowed'][name]:.3f}×")
    console = Console(width=160)
    console.print(table)
    console.print({"rows that stay": ways["kept"]})
