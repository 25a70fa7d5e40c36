"""Recurrent cores to compare with: row after row on whole documents, and in pieces that know of each other by states.

The pieces are of one rank, and exchange states and summaries alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from distca.recurrent import CoreParameters, CoreRows, Recurrence, RecurrentKernel, Span, carried


def recurrent_core(
    mixed_NC: torch.Tensor,
    g: torch.Tensor,
    beta_NH: torch.Tensor,
    parameters: CoreParameters,
    lengths: list[int],
    what: Recurrence,
) -> torch.Tensor:
    """o_NHV of packed documents, in the dtype of their rows; differentiable in all tensors.

    Args:
        mixed_NC: rows before the convolution.
        g: g_NH, logarithms of the decay.
        beta_NH: factors of the additions.
        parameters: of the core.
        lengths: of the documents.
        what: the recurrence.
    """
    outputs, begin = [], 0
    for length in lengths:
        rows = slice(begin, begin + length)
        outputs.append(_document(mixed_NC[rows], g[rows], beta_NH[rows], parameters, what))
        begin += length
    return torch.cat([*outputs, mixed_NC.new_zeros(0, what.heads, what.value_dim)])


def _document(
    mixed_NC: torch.Tensor, g: torch.Tensor, beta_NH: torch.Tensor, parameters: CoreParameters, what: Recurrence
) -> torch.Tensor:
    state = mixed_NC.new_zeros(what.state_shape)
    skip = mixed_NC.new_zeros(what.heads) if parameters.skip is None else parameters.skip
    repeats = what.heads // what.key_heads
    outputs = []
    for row in range(len(mixed_NC)):
        seen = [mixed_NC[row - back] * parameters.kernel[:, -1 - back] for back in range(min(row + 1, what.kernel))]
        mixed = torch.stack(seen).sum(0)
        if parameters.bias is not None:
            mixed = mixed + parameters.bias
        parts = dict(zip(what.columns, (mixed * torch.sigmoid(mixed)).split(what.widths), strict=True))
        q, k = (parts[name].view(what.key_heads, what.key_dim) for name in ("q", "k"))
        if what.normalise:
            q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (torch.stack([x[head // repeats] for head in range(what.heads)]) for x in (q, k))
        v = parts["v"].view(what.heads, what.value_dim)
        kept = g[row].exp()
        state = kept[:, None, None] * state
        held = torch.einsum("hkv,hk->hv", state, k) if what.delta else 0.0
        state = state + torch.einsum("hk,hv->hkv", k, beta_NH[row][:, None] * (v - held))
        outputs.append(what.scale * torch.einsum("hkv,hk->hv", state, q) + skip[:, None] * v)
    return torch.stack(outputs)


def spans_of(documents: Sequence[Sequence[int]]) -> list[list[Span]]:
    """The spans of each document's pieces, from their rows, all one after the other."""
    begin, found = 0, []
    for pieces in documents:
        found.append(list(pairwise(accumulate(pieces, initial=begin))))
        begin += sum(pieces)
    return found


def in_pieces(
    kernel: RecurrentKernel, rows: CoreRows, do_NHV: torch.Tensor, documents: list[list[Span]]
) -> dict[str, torch.Tensor]:
    """Outputs and gradients of all rows, by name.

    Args:
        kernel: computes the pieces.
        rows: of all documents.
        do_NHV: gradients of the outputs.
        documents: spans of each one's pieces.
    """
    o, gradients = torch.zeros_like(rows.v), rows.zeros_like()
    alone = [spans[0] for spans in documents if len(spans) == 1]
    kernel.forward(rows, alone, None, o, False)
    kernel.backward(rows, alone, None, do_NHV, None, gradients, False)
    for first, *inner, last in (spans for spans in documents if len(spans) > 1):
        states = [kernel.forward(rows, [first], None, o)[0]]
        own, transitions = kernel.summaries(rows, inner)
        for transition, added in zip(transitions, own, strict=True):
            states.append(carried(transition, states[-1]) + added)
        kernel.forward(rows, [*inner, last], torch.stack(states), o, False)
        behind = [kernel.backward(rows, [last], states[-1][None], do_NHV, None, gradients)[0]]
        alone_in_pieces = kernel.state_gradients(rows, inner, do_NHV)
        for transition, added in zip(transitions.flip(0), alone_in_pieces.flip(0), strict=True):
            behind.append(carried(transition, behind[-1], backward=True) + added)
        of_first = behind.pop()
        if inner:
            kernel.backward(rows, inner, torch.stack(states[:-1]), do_NHV, torch.stack(behind[::-1]), gradients, False)
        kernel.backward(rows, [first], None, do_NHV, of_first[None], gradients, False)
    return {"o": o} | dict(zip(("dq", "dk", "dv", "dg", "dbeta"), gradients.all, strict=True))
