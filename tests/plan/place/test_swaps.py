"""Documents that are swapped between ranks until nothing has to be cut or sent."""

from __future__ import annotations

import numpy as np
import pytest

from distca.plan import analytic_cost
from distca.plan.metrics import server_seconds
from distca.plan.options import PlanOptions
from distca.plan.place.swaps import OF_NANO_BATCHES, OF_RANKS, swapped
from distca.plan.recurrent.pieces import DocumentPieces
from distca.plan.routes import route
from distca.plan.step import StepPlan, plan_step


def test_a_swap_makes_tokens_equal() -> None:
    length = np.array([6, 3, 4, 1])
    found = swapped(length, length.astype(float), np.array([0, 0, 1, 1]), 2, OF_RANKS)
    assert found is not None and np.bincount(found, length, 2).tolist() == [7, 7]


def test_tokens_that_cannot_be_equal_are_refused_and_what_was_given_is_not_changed() -> None:
    given = np.array([0, 1])
    assert swapped(np.array([5, 2]), np.ones(2), given, 2, OF_RANKS) is None
    assert given.tolist() == [0, 1]


def test_work_is_levelled_where_tokens_fit() -> None:
    length = np.array([70, 70, 60, 40, 40])
    found = swapped(length, length.astype(float) ** 2, np.array([0, 0, 1, 1, 1]), 2, 0.1)
    assert found is not None
    assert sorted(length[found == found[2]].tolist()) == [60, 70], "work of 8,500 and 8,100; before 9,800 and 6,800"


@pytest.mark.parametrize("bins", [1, 2, 5])
def test_swaps_end_and_keep_to_their_limit(bins: int) -> None:
    draw = np.random.default_rng(bins)
    for _ in range(10):
        length = draw.integers(1, 3000, int(draw.integers(0, 40 * bins)))
        before = draw.integers(0, bins, len(length))
        found = swapped(length, length**1.5, before, bins, OF_NANO_BATCHES)
        if found is not None:
            tokens = np.bincount(found, length, bins)
            assert np.abs(tokens - tokens.mean()).max() <= OF_NANO_BATCHES * tokens.mean()


def _planned(documents: np.ndarray, **more) -> StepPlan:
    return plan_step([documents], PlanOptions(2, analytic_cost(16, 4, 256), nano_batches=2, recurrent=True, **more))


def _documents(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1000, 24000, 34)


@pytest.mark.parametrize("seed", range(8))
def test_level_documents_of_recurrent_models_are_not_cut_and_no_row_travels_or_is_copied(seed: int) -> None:
    plan = _planned(_documents(seed))
    pieces = DocumentPieces.of(plan.layouts[0])
    assert pieces.opens.all() and pieces.closes.all() and (np.bincount(pieces.shards.document) == 1).all()
    assert plan.balance().bytes_moved == 0
    rows = np.sum([layout.q_rows for layout in plan.layouts[0]], axis=0)
    assert np.abs(rows - rows.mean()).max() <= OF_RANKS * rows.mean()
    seconds = plan.seconds_by_kind().sum(axis=0)
    assert (seconds.max(axis=1) <= 1.02 * seconds.mean(axis=1)).all()
    for each in plan.forward[0].plans:
        for rank in range(2):
            for moves in (route(each, rank).q, route(each, rank).kv):
                assert not moves.travelling and (moves.keep.source == moves.keep.destination).all()


def test_no_row_travels_where_ranks_are_level_over_both_nano_batches_but_not_in_each() -> None:
    documents = np.array([32000, 22600, 22600, *[1000] * 30, 600, 600])
    plan = _planned(documents)
    assert plan.balance().bytes_moved == 0
    in_ping = [_of_nano_batch(plan, nano) for nano in (0, 1)]
    assert max(each.max() / each.mean() for each in in_ping) > 1.2


def _of_nano_batch(plan: StepPlan, nano: int) -> np.ndarray:
    return server_seconds(plan.forward[0].plans[nano], plan.options.cost, "both")


def test_rows_travel_where_one_document_has_more_work_than_all_others() -> None:
    plan = _planned(np.append(np.full(30, 1000), 30000))
    assert plan.balance().bytes_moved > 0
    seconds = plan.seconds_by_kind().sum(axis=(0, 1))
    assert seconds.max() < 1.03 * seconds.mean()


@pytest.mark.parametrize("more", [{"align": 2}, {"stages": 2, "resend": True}])
def test_a_multiple_of_rows_is_kept_and_stages_share_their_work(more) -> None:
    plan = _planned(_documents(0), **more)
    assert all(layout.q_rows[0] % plan.options.align == 0 for layout in plan.layouts[0])
    assert plan.balance().bytes_moved > 0
