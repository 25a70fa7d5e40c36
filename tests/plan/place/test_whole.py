"""Placements that cut few documents: what is whole, what is cut, and when a plan takes one."""

from __future__ import annotations

import numpy as np
import pytest

from distca.errors import PlanError
from distca.plan import Links, analytic_cost, area_cost, choice
from distca.plan.options import PlanOptions
from distca.plan.place.lay_out import lay_out
from distca.plan.place.whole import whole_documents
from distca.plan.recurrent.pieces import DocumentPieces
from distca.plan.step import plan_step


def _on_several_ranks(layouts) -> int:
    pieces = DocumentPieces.of(layouts).shards
    pairs = np.unique(np.stack((pieces.document, pieces.rank)), axis=1)
    return int((np.bincount(pairs[0]) > 1).sum())


def test_documents_with_room_stay_whole_and_the_last_is_cut() -> None:
    rank_of, rest, _ = whole_documents(np.array([6, 3, 3]), np.array([6, 6]), np.ones(3))
    assert len(rest.start) == 0 and rank_of[1] == rank_of[2] != rank_of[0]
    rank_of, rest, rank = whole_documents(np.array([4, 4, 4]), np.array([6, 6]), np.ones(3))
    assert rank_of.tolist() == [0, 1, -1]
    assert (rest.start.tolist(), rest.stop.tolist(), rank.tolist()) == ([0, 2], [2, 4], [0, 1])


def test_work_decides_among_ranks_with_room() -> None:
    rank_of, _, _ = whole_documents(np.array([6, 5, 4, 3]), np.array([9, 9]), np.array([9.0, 1.0, 1.0, 1.0]))
    assert rank_of.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("seed", range(60))
def test_every_row_has_one_place_and_few_documents_lie_on_several_ranks(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ranks, align = int(draw.integers(1, 9)), int(draw.choice([1, 2, 16]))
    lengths = draw.integers(1, int(draw.choice([5, 50, 3000])), int(draw.integers(ranks * 3, ranks * 40)))
    if lengths.max() > lengths.sum() // ranks // align * align:
        pytest.skip("a document is longer than a rank")
    nano_batches, dealing = int(draw.integers(1, 3)), str(draw.choice(["in_order", "even", "lean"]))
    layouts = lay_out(
        lengths, ranks, nano_batches=nano_batches, dealing=dealing, placement="whole", align=align, cost=area_cost()
    )
    for layout in layouts:
        assert (layout.q_rows[:-1] % align == 0).all()
        taken = [
            (rank, row)
            for _, start, stop, rank, at in zip(*layout.q.columns(), strict=True)
            for row in range(at, at + stop - start)
        ]
        assert len(set(taken)) == len(taken) == layout.q_rows.sum()
    pieces = DocumentPieces.of(layouts).shards
    found = np.bincount(pieces.document, weights=pieces.stop - pieces.start, minlength=len(lengths))
    assert (found == lengths).all()
    assert _on_several_ranks(layouts) < ranks


def test_a_document_that_is_longer_than_a_rank_is_refused() -> None:
    with pytest.raises(PlanError, match="9 tokens does not stay whole on ranks of 6"):
        lay_out([9, 3], 2, placement="whole")


def _options(**more) -> PlanOptions:
    return PlanOptions(4, analytic_cost(16, 4, 256), nano_batches=2, **more)


def _documents() -> np.ndarray:
    draw = np.random.default_rng(3)
    return np.concatenate((draw.integers(200, 3000, 240), [60000, 40000, 21000]))


def test_a_model_with_recurrent_layers_gets_fewer_pieces_and_attention_is_still_level() -> None:
    usual, whole = (plan_step([_documents()], _options(recurrent=each)) for each in (False, True))
    assert _on_several_ranks(whole.layouts[0]) < 4 < len(DocumentPieces.of(usual.layouts[0])) - len(_documents())
    seconds = whole.seconds_by_kind().sum(axis=(0, 1))
    assert seconds.max() < 1.03 * seconds.mean()


@pytest.mark.parametrize(
    ("documents", "more"),
    [
        (_documents(), {"links": Links(1)}),
        (_documents(), {"links": Links(2)}),
        (_documents(), {"servers": 1}),
        (np.array([90000, 100]), {}),
    ],
)
def test_documents_are_placed_by_work_beside_a_network_or_servers_or_if_one_is_too_long(documents, more) -> None:
    usual, found = (plan_step([documents], _options(recurrent=each, **more)) for each in (False, True))
    assert found.fingerprint == usual.fingerprint


def test_documents_are_placed_by_work_where_attention_would_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_FEWER_PIECES", -0.5)
    usual, found = (plan_step([_documents()], _options(recurrent=each)) for each in (False, True))
    assert found.fingerprint == usual.fingerprint
