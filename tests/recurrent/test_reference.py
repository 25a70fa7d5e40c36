"""The chunked reference against the formula one row after the other: outputs, states, summaries and all gradients in
float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from distca.recurrent import CoreRows, Recurrence, carried, choose_recurrent_kernel
from distca.recurrent.convolution import PieceRows, core_rows
from distca.testing.reference_attention import relative_error
from distca.testing.reference_recurrence import recurrent_core
from tests.recurrent.cases import RECURRENCES, leaves_of, parameters_of

TOLERANCE = 1e-12
LENGTHS = [1, 37, 2, 16, 17]  # around chunks of 16 rows


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return list(pairwise(ends))


def _packed(what: Recurrence, leaves: list[torch.Tensor], lengths: list[int]) -> CoreRows:
    whole = PieceRows(_spans(lengths), [False] * len(lengths), torch.zeros(0, what.halo_rows, dtype=torch.int64))
    mixed, g, beta = leaves[:3]
    return core_rows(mixed, g, beta, mixed.new_zeros(0, what.channels), parameters_of(leaves), whole, what)


@pytest.mark.parametrize("name", RECURRENCES)
def test_whole_documents(name: str) -> None:
    what = RECURRENCES[name]
    kernel = choose_recurrent_kernel(what, "cpu", torch.float64)
    padding = 2
    leaves = leaves_of(what, sum(LENGTHS) + padding, seed=len(name))
    parameters = replace(parameters_of(leaves), skip=None)
    expected = recurrent_core(*leaves[:3], parameters, LENGTHS, what)
    rows = _packed(what, leaves, LENGTHS)
    o = torch.zeros_like(rows.v)
    kernel.forward(rows, _spans(LENGTHS), None, o)
    assert relative_error(o[:-padding], expected) <= TOLERANCE
    assert not o[-padding:].any() and not any(each[-padding:].any() for each in (rows.q, rows.k, rows.v))
    do = torch.randn_like(o)
    gradients = rows.zeros_like()
    kernel.backward(rows, _spans(LENGTHS), o.new_zeros(len(LENGTHS), *what.state_shape), do, None, gradients)
    wanted = torch.autograd.grad(expected, leaves[:5], do[:-padding])
    torch.autograd.backward(rows.all, gradients.all)
    for leaf, gradient in zip(leaves, wanted, strict=False):
        assert relative_error(leaf.grad, gradient) <= TOLERANCE


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_document_in_two_pieces(name: str) -> None:
    """States, summaries and the gradients of states against the whole document's."""
    what = RECURRENCES[name]
    kernel = choose_recurrent_kernel(what, "cpu", torch.float64)
    leaves = leaves_of(what, 40, seed=3)
    rows = CoreRows(*(each.detach() for each in _packed(what, leaves, [40]).all))
    head, tail = (0, 23), (23, 40)
    o, do = torch.zeros_like(rows.v), torch.randn_like(rows.v)
    whole_gradients, gradients = rows.zeros_like(), rows.zeros_like()
    zeros = o.new_zeros(1, *what.state_shape)
    last = kernel.forward(rows, [(0, 40)], None, o)
    kernel.backward(rows, [(0, 40)], zeros, do, None, whole_gradients)

    in_pieces = torch.zeros_like(o)
    between = kernel.forward(rows, [head], None, in_pieces)
    behind = kernel.forward(rows, [tail], between, in_pieces)
    own, transition = kernel.summaries(rows, [tail])
    assert transition.shape == (1, *what.transition_shape)
    assert relative_error(in_pieces, o) <= TOLERANCE
    assert relative_error(behind, last) <= TOLERANCE
    assert relative_error(carried(transition, between) + own, last) <= TOLERANCE

    alone = kernel.state_gradients(rows, [tail], do)
    dbetween = kernel.backward(rows, [tail], between, do, None, gradients)
    assert relative_error(dbetween, alone) <= TOLERANCE
    kernel.backward(rows, [head], zeros, do, dbetween, gradients)
    for found, wanted in zip(gradients.all, whole_gradients.all, strict=True):
        assert relative_error(found, wanted) <= TOLERANCE
    # Gradients of states behind a piece go through its transition.
    dlast = torch.randn_like(last)
    through = kernel.backward(rows, [tail], between, torch.zeros_like(do), dlast, rows.zeros_like())
    assert relative_error(carried(transition, dlast, backward=True), through) <= TOLERANCE


def test_strong_decay_and_bfloat16() -> None:
    """What decays to nothing within a chunk overflows nowhere, and states stay in float32."""
    what = RECURRENCES["gated delta net"]
    leaves = leaves_of(what, 33, seed=1)
    leaves[1] = leaves[1].detach() * 300
    rows = CoreRows(*(each.detach().bfloat16() for each in _packed(what, leaves, [33]).all))
    o = torch.zeros_like(rows.v)
    state = choose_recurrent_kernel(what, "cpu", torch.float64).forward(rows, [(0, 33)], None, o)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert bool(o.isfinite().all()) and bool(state.isfinite().all())
