"""Recurrent cores on documents in pieces that know of each other by states and summaries alone, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from distca.recurrent import CoreRows, RecurrentKernel, Span, carried


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
