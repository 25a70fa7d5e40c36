"""The rows that the transport's measurements send: the same rows from every rank to every other, and rows of real
plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from distca.data.mixes import Mix, sample_long_context
from distca.plan import AttentionKind
from distca.plan.cost.analytic import analytic_cost
from distca.plan.micro_batch import plan_micro_batch
from distca.runtime import NanoRoutes
from distca.transport import Part, RowMoves
from distca.transport.cuda_ops import row_bytes

ROW = 4096  # bytes: the k,v rows of 8 heads, 128 wide, in bfloat16
MIB = 2**20
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def uniform(rows: int) -> Part:
    """Every rank sends ``rows`` rows of its own, of 4096 bytes, to every other."""
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
        keep_ranges=np.empty((0, 3), np.int64),
        reduction=None,
        travelling=total * ranks,
    )
    source = torch.randn(total, ROW // 2, device="cuda").bfloat16()
    return Part(source, torch.zeros_like(source), moves)


def expected(part: Part) -> torch.Tensor:
    """The rows that :func:`uniform` must bring to this rank."""
    received = torch.empty_like(part.source)
    dist.all_to_all_single(received, part.source, part.moves.receive_counts, part.moves.send_counts)
    return received


def planned(mix: Mix, tokens: int) -> tuple[Part, ...]:
    """q and k,v of a planned nano-batch on their way to the attention servers, as in training."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cost = analytic_cost(HEADS, KV_HEADS, HEAD_DIM)
    kinds_of_layers = [AttentionKind(HEAD_DIM**-0.5)]
    lengths = sample_long_context(mix, tokens * ranks, tokens, seed=1)
    nano = plan_micro_batch(lengths, ranks, cost).nano_batches[0]
    routes = NanoRoutes.of(nano.forward, nano.backward, rank, kinds_of_layers, "cuda").forward
    kinds = ((routes.q_to_server, (HEADS, HEAD_DIM)), (routes.kv_to_server, (2, KV_HEADS, HEAD_DIM)))
    return tuple(
        Part(
            torch.randn(moves.source_rows, *shape, device="cuda").bfloat16(),
            torch.empty(moves.destination_rows, *shape, device="cuda", dtype=torch.bfloat16),
            moves,
        )
        for moves, shape in kinds
    )


def busiest_bytes(parts: tuple[Part, ...]) -> int:
    """The bytes of the rank that sends or receives most."""
    widths = [row_bytes(part.source) for part in parts]
    sent = sum(sum(part.moves.send_counts) * width for part, width in zip(parts, widths, strict=True))
    received = sum(sum(part.moves.receive_counts) * width for part, width in zip(parts, widths, strict=True))
    box = torch.tensor(max(sent, received), device="cuda")
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box)


def without_kept(part: Part) -> Part:
    """The same, of the rows that travel only."""
    moves, nothing = part.moves, part.moves.keep_source[:0]
    ranges = moves.keep_ranges[:0]
    return replace(part, moves=replace(moves, keep_source=nothing, keep_destination=nothing, keep_ranges=ranges))
