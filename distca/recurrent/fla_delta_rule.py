"""The kernel of recurrent cores for GPUs: the gated delta rule by fla-core's Triton kernels.

A *piece* is a run of a document's rows on one rank. It turns the state before it into A·S + B; A and B are its summary
(kernel.py). fla-core's public functions are autograd functions over whole sequences. Here the functions below them are
called: they also take the states before sequences and the gradients of states behind them. fla-core's functions for
context parallelism give summaries in float32. All these are private, so only one version of fla-core is used
(select.py).

fla-core computes in *chunks* of 64 rows. Shape suffixes: N rows of a rank, H heads, K elements of a head of q or k, V
of one of v; P pieces of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from distca.device.host_to_device import to_device
from distca.plan.recurrence import Recurrence
from distca.recurrent.chunk_gradients import chunk_gradients
from distca.recurrent.kernel import CoreRows, RecurrentKernel, Span, carried

CHUNK_ROWS = 64
"""Rows of a chunk, as fla-core has them."""
SUMMARY_ROWS = 8192
"""The most rows of which fla-core's kernel makes one summary. Longer pieces are cut, and summaries of parts composed.
The kernel goes from chunk to chunk, and takes 11 ms for 65,536 rows of 32 heads on an H200; parts run at the same time.
The number is a guess that gives 8 parts there, not measured."""


@dataclass(frozen=True)
class _Run:
    """Pieces that follow each other in memory, which one call of fla-core computes as several sequences.

    Attributes:
        pieces: their numbers among the pieces of the call.
        span: first row of the first piece, and one past the last row of the last piece.
        borders: fla-core's arguments for the borders of sequences and chunks.
    """

    pieces: slice
    span: Span
    borders: dict[str, torch.Tensor]


class FlaDeltaRule:
    """One recurrence by fla-core's kernels, in bfloat16 or float16 with float32 states.

    Args:
        recurrence: a recurrence with the delta rule.
        own_gradients: whether chunk_gradients.py replaces a kernel that fla-core refuses to run on some GPUs.
        summary_rows: the most rows of which the kernel makes one summary, a multiple of ``CHUNK_ROWS``.
    """

    def __init__(self, recurrence: Recurrence, own_gradients: bool = False, summary_rows: int = SUMMARY_ROWS) -> None:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu
        from fla.ops.common.chunk_o import chunk_bwd_dv_local
        from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
        from fla.ops.gated_delta_rule import chunk
        from fla.ops.utils import chunk_local_cumsum

        assert recurrence.delta
        self.name = "fla, with gradients within chunks of our own" if own_gradients else "fla"
        self._what, self.own_gradients, self._fla = recurrence, own_gradients, chunk
        self._summary_rows = summary_rows
        self._sums, self._within = chunk_local_cumsum, chunk.chunk_gated_delta_rule_fwd_intra
        self._summaries, self._state_gradients = chunk_cp_fwd_h, chunk_gated_delta_rule_bwd_dhu
        self._gradients_of_additions = chunk_bwd_dv_local

    def forward(
        self,
        rows: CoreRows,
        spans: Sequence[Span],
        states_PHKV: torch.Tensor | None,
        o_NHV: torch.Tensor,
        wanted: bool = True,
    ) -> torch.Tensor:
        behind = self._states(rows, len(spans) if wanted else 0)
        for run in _runs(spans, o_NHV.device):
            _, o, _, states, _, _ = self._fla.chunk_gated_delta_rule_fwd(
                **_named(rows, run),
                scale=self._what.scale,
                initial_state=None if states_PHKV is None else states_PHKV[run.pieces],
                output_final_state=wanted,
                **run.borders,
            )
            o_NHV[slice(*run.span)] = o[0]
            if wanted:
                behind[run.pieces] = states
        return behind

    def summaries(self, rows: CoreRows, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        what = self._what
        parts, counts = in_parts(spans, self._summary_rows)
        both = self._states(rows, len(parts), what.value_dim + what.key_dim)
        for run in _runs(parts, both.device):
            own = _named(rows, run)
            g = self._sums(own["g"], chunk_size=CHUNK_ROWS, scale=1 / np.log(2), **run.borders)
            w, u, _ = self._within(k=own["k"], v=own["v"], g=g, beta=own["beta"], **run.borders)
            borders = run.borders["cu_seqlens"]
            self._summaries(own["k"], w, u, both[run.pieces], g=g, cu_seqlens=borders, multi_seqs=True)
        states, transitions = composed(both, counts, what.value_dim).split((what.value_dim, what.key_dim), dim=-1)
        return states.contiguous(), transitions.contiguous()

    def state_gradients(self, rows: CoreRows, spans: Sequence[Span], do_NHV: torch.Tensor) -> torch.Tensor:
        gradients = self._states(rows, len(spans))
        for run in _runs(spans, do_NHV.device):
            own, do = _named(rows, run), do_NHV[None, slice(*run.span)]
            g = self._sums(own["g"], chunk_size=CHUNK_ROWS, scale=1 / np.log(2), **run.borders)
            w, _, _ = self._within(k=own["k"], v=own["v"], g=g, beta=own["beta"], **run.borders)
            common = {"q": own["q"], "k": own["k"], "do": do, "g": g, "scale": self._what.scale, **run.borders}
            du = self._gradients_of_additions(**common)
            # fla-core does not read h0; it returns the gradients of the first states only if h0 is given.
            _, gradients[run.pieces], _ = self._state_gradients(
                **common, w=w, dv=du, h0=self._states(rows, run.pieces.stop - run.pieces.start)
            )
        return gradients

    def backward(
        self,
        rows: CoreRows,
        spans: Sequence[Span],
        states_PHKV: torch.Tensor | None,
        do_NHV: torch.Tensor,
        dstates_PHKV: torch.Tensor | None,
        gradients: CoreRows,
        wanted: bool = True,
    ) -> torch.Tensor:
        before = self._states(rows, len(spans) if wanted else 0)
        if states_PHKV is None and wanted:
            states_PHKV = torch.zeros_like(before)
        for run in _runs(spans, do_NHV.device):
            own = _named(rows, run)
            own["g"] = self._sums(own["g"], chunk_size=CHUNK_ROWS, scale=1 / np.log(2), **run.borders)
            # The index frees the other two results at once.
            solved = self._within(k=own["k"], v=own["v"], g=own["g"], beta=own["beta"], **run.borders)[2]
            with self._gradients_within_chunks():
                dq, dk, dv, dbeta, dg, dstates, _, _ = self._fla.chunk_gated_delta_rule_bwd(
                    **own,
                    A=solved,
                    scale=self._what.scale,
                    initial_state=None if states_PHKV is None else states_PHKV[run.pieces],
                    do=do_NHV[None, slice(*run.span)],
                    dht=None if dstates_PHKV is None else dstates_PHKV[run.pieces],
                    **run.borders,
                )
            for whole, part in zip(gradients.all, (dq, dk, dv, dg, dbeta), strict=True):
                whole[slice(*run.span)] = part[0]
            if wanted:
                before[run.pieces] = dstates
        return before

    def _gradients_within_chunks(self) -> AbstractContextManager[Any]:
        """A context in which fla-core calls :func:`chunk_gradients`, if this kernel has own gradients."""
        return patch.object(self._fla, "chunk_bwd_dqkwg", chunk_gradients) if self.own_gradients else nullcontext()

    def _states(self, rows: CoreRows, count: int, width: int | None = None) -> torch.Tensor:
        """New memory for ``count`` states, whose last dimension is ``width``; None for V."""
        heads, key_dim, value_dim = self._what.state_shape
        return rows.v.new_empty(count, heads, key_dim, width or value_dim, dtype=torch.float32)


def in_parts(spans: Sequence[Span], most: int) -> tuple[list[Span], list[int]]:
    """Returns the parts of all pieces, of at most ``most`` rows each, and how many parts each piece has."""
    parts = [[(at, min(at + most, end)) for at in range(begin, end, most)] for begin, end in spans]
    return [part for each in parts for part in each], [len(each) for each in parts]


def composed(summaries: torch.Tensor, counts: Sequence[int], value_dim: int) -> torch.Tensor:
    """Composes the summaries of pieces from those of their parts, in the order of rows.

    A part with own state B and transition A turns what came before it, B' and A', into A·B' + B and A·A'.

    Args:
        summaries: [parts, H, K, V + K] float32, each an own state beside a transition.
        counts: how many parts each piece has.
        value_dim: V.

    Returns:
        The same of the pieces, [P, H, K, V + K].
    """
    if len(counts) == len(summaries):
        return summaries
    found = []
    for parts in summaries.split(list(counts)):
        whole = parts[0]
        for part in parts[1:]:
            whole = carried(part[..., value_dim:], whole)
            whole[..., :value_dim] += part[..., :value_dim]
        found.append(whole)
    return torch.stack(found)


def let_fla_differentiate(kernel: RecurrentKernel) -> None:
    """Lets fla-core's public functions call :func:`chunk_gradients` from now on, if ``kernel`` has own gradients.

    It is for comparisons with models that call these functions."""
    if isinstance(kernel, FlaDeltaRule) and kernel.own_gradients:
        from fla.ops.gated_delta_rule import chunk

        chunk.chunk_bwd_dqkwg = chunk_gradients


def _named(rows: CoreRows, run: _Run) -> dict[str, torch.Tensor]:
    """The rows of a run by fla-core's names of arguments, with a leading dimension of 1."""
    named = zip(("q", "k", "v", "g", "beta"), rows.at(run.span).all, strict=True)
    return {name: each[None].contiguous() for name, each in named}


def _runs(spans: Sequence[Span], device: torch.device) -> Iterator[_Run]:
    """Groups pieces that follow each other in memory."""
    first = 0
    for at in range(1, len(spans) + 1):
        if at == len(spans) or spans[at][0] != spans[at - 1][1]:
            lengths = tuple(end - begin for begin, end in spans[first:at])
            yield _Run(slice(first, at), (spans[first][0], spans[at - 1][1]), _borders(lengths, device))
            first = at


@lru_cache(maxsize=64)  # All layers of a micro-batch have the same pieces, in forward and backward.
def _borders(lengths: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    """fla-core's arguments for the borders of pieces with these lengths.

    They are the first rows of pieces and the end, and for each chunk its piece and its number there. fla-core would
    find the chunks itself, but would wait for the GPU."""
    ends = np.cumsum((0, *lengths))
    numbers = [np.arange(0, end - begin, CHUNK_ROWS) // CHUNK_ROWS for begin, end in pairwise(ends)]
    pieces = np.repeat(np.arange(len(lengths)), [len(each) for each in numbers])
    chunks = np.stack((pieces, np.concatenate(numbers)), axis=1)
    return {"cu_seqlens": to_device(ends, device), "chunk_indices": to_device(chunks, device)}
