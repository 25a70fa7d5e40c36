"""A kernel of recurrent cores in plain torch, for any device and dtype; other kernels are compared with it in float64.

The formula of ``plan/recurrence.py`` goes row by row. Here rows are processed in *chunks* of 16, with matrix products.
S is the state before a chunk, and G_i is the sum of g from the chunk's first row to row i. Each row adds k_i u_iᵀ to
the state. The u of a chunk (U) solve a triangular system, and then give the outputs and the next state:

    (1 + tril(β_i e^{G_i−G_j} k_i·k_j, −1)) U = β (V − (K e^G) S)
    O = scale · ((Q e^G) S + tril(e^{G_i−G_j} q_i·k_j) U),   S ← e^{G_C} S + (K e^{G_C−G})ᵀ U

Without the delta rule U is β V. Shape suffixes: N rows, H heads, K elements of a head of q or k, V of one of v; P
pieces of documents; C and D rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.plan.recurrence import Recurrence
from distca.recurrent.kernel import CoreRows, Span, wide

_CHUNK_ROWS = 16
"""Rows of a chunk."""


class ReferenceRecurrence:
    """One recurrence in plain torch. It computes one piece at a time, and its gradients are autograd's."""

    name = "reference"

    def __init__(self, recurrence: Recurrence) -> None:
        self._recurrence = recurrence

    def forward(
        self,
        rows: CoreRows,
        spans: Sequence[Span],
        states_PHKV: torch.Tensor | None,
        o_NHV: torch.Tensor,
        wanted: bool = True,
    ) -> torch.Tensor:
        behind = self._states(rows, len(spans) if wanted else 0)
        for at, span in enumerate(spans):
            state = self._states(rows, 1)[0].zero_() if states_PHKV is None else states_PHKV[at]
            o_NHV[slice(*span)], state = _scan(rows.at(span), state, self._recurrence)
            if wanted:
                behind[at] = state
        return behind

    def summaries(self, rows: CoreRows, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        what = self._recurrence
        own = self._states(rows, len(spans))
        transitions = own.new_empty(len(spans), *what.transition_shape)
        for at, piece in enumerate(rows.at(span) for span in spans):
            if what.delta:
                # One pass gives both B and A: v gets K more columns of zeros, whose state begins as the unit matrix.
                zeros = piece.v.new_zeros(*piece.k.shape)
                both = CoreRows(piece.q, piece.k, torch.cat((piece.v, zeros), dim=2), piece.g, piece.beta)
                unit = torch.eye(what.key_dim, dtype=own.dtype, device=own.device).expand(what.heads, -1, -1)
                state = torch.cat((own.new_zeros(what.state_shape), unit), dim=2)
                _, behind = _scan(both, state, what)
                own[at], transitions[at] = behind.split((what.value_dim, what.key_dim), dim=2)
            else:
                _, own[at] = _scan(piece, own.new_zeros(what.state_shape), what)
                transitions[at] = piece.g.to(own.dtype).sum(0).exp().reshape(what.transition_shape)
        return own, transitions

    def state_gradients(self, rows: CoreRows, spans: Sequence[Span], do_NHV: torch.Tensor) -> torch.Tensor:
        gradients = self._states(rows, len(spans))
        for at, span in enumerate(spans):
            state = torch.zeros_like(gradients[at]).requires_grad_()
            with torch.enable_grad():
                o, _ = _scan(rows.at(span), state, self._recurrence)
            (gradients[at],) = torch.autograd.grad(o, state, do_NHV[slice(*span)].to(o.dtype))
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
        for at, span in enumerate(spans):
            state = self._states(rows, 1)[0].zero_() if states_PHKV is None else states_PHKV[at]
            leaves = [each.detach().requires_grad_() for each in (*rows.at(span).all, state)]
            with torch.enable_grad():
                o, behind = _scan(CoreRows(*leaves[:5]), leaves[5], self._recurrence)
            given = [do_NHV[slice(*span)].to(o.dtype)]
            given.append(torch.zeros_like(behind) if dstates_PHKV is None else dstates_PHKV[at])
            *found, of_state = torch.autograd.grad([o, behind], leaves, given, materialize_grads=True)
            if wanted:
                before[at] = of_state
            for whole, part in zip(gradients.all, found, strict=True):
                whole[slice(*span)] = part
        return before

    def _states(self, rows: CoreRows, count: int) -> torch.Tensor:
        return torch.empty(count, *self._recurrence.state_shape, dtype=wide(rows.v.dtype), device=rows.v.device)


def _scan(rows: CoreRows, state_HKV: torch.Tensor, what: Recurrence) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o_NHV in at least float32, and the state behind the rows; ``state_HKV`` is the state before them."""
    outputs = []
    for chunk in zip(*(each.split(_CHUNK_ROWS) for each in rows.all), strict=True):
        heads_first = CoreRows(*(each.to(state_HKV.dtype).transpose(0, 1) for each in chunk))
        o_HCV, state_HKV = _chunk(heads_first, state_HKV, what)
        outputs.append(o_HCV.transpose(0, 1))
    return torch.cat(outputs), state_HKV


def _chunk(rows: CoreRows, state_HKV: torch.Tensor, what: Recurrence) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs of a chunk's rows, heads first, and the state behind them."""
    # "sums" are G, "decay" is e^{G_C−G_D} for rows D up to C, and "additions" become U.
    q_HCK, k_HCK, v_HCV = rows.q, rows.k, rows.v
    sums = rows.g[..., None].cumsum(dim=1)  # [H, C, 1]
    count = sums.shape[1]
    behind = torch.ones(count, count, dtype=torch.bool, device=sums.device).triu(1)
    apart = (sums[:, :, None] - sums[:, None])[..., 0]  # [H, C, D]
    decay_HCD = apart.masked_fill(behind, -torch.inf).exp()
    additions = v_HCV
    if what.delta:
        additions = v_HCV - (k_HCK * sums.exp()) @ state_HKV
    additions = rows.beta[..., None] * additions
    if what.delta:
        overlap_HCD = rows.beta[..., None] * (k_HCK @ k_HCK.mT * decay_HCD)
        additions = torch.linalg.solve_triangular(overlap_HCD.tril(-1), additions, upper=False, unitriangular=True)
    o_HCV = (q_HCK * sums.exp()) @ state_HKV + (q_HCK @ k_HCK.mT * decay_HCD) @ additions
    last = sums[:, -1:]
    state_HKV = last.exp().mT * state_HKV + (k_HCK * (last - sums).exp()).mT @ additions
    return what.scale * o_HCV, state_HKV
