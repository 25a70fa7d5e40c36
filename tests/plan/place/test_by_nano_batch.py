import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.data.mixes import sample_lengths
from distca.plan import (
    analytic_cost,
    area_cost,
    lay_out,
    schedule,
)
from distca.plan.place.by_nano_batch import spread
from distca.plan.place.nano_batches import Stream
from tests.plan.cases import home_imbalance, home_rows, kilobytes, lengths

LLAMA_8B = analytic_cost(32, 8, 128)


@given(lengths.filter(len), st.integers(1, 6), st.sampled_from((1, 3)), st.sampled_from((area_cost(), LLAMA_8B)))
def test_every_token_is_placed_once_and_every_budget_is_met_exactly(documents, ranks, align, cost) -> None:
    for nano_batches in (1, 2):
        options = {"nano_batches": nano_batches, "align": align, "dealing": "even", "cost": cost}
        found = lay_out(documents, ranks, placement="spread_by_nano_batch", **options)
        in_order = lay_out(documents, ranks, **options)
        rows = [tuple(row) for layout in found for tensor in home_rows(layout, "q") for row in tensor.tolist()]
        assert sorted(rows) == [(d, p) for d, length in enumerate(documents) for p in range(length)]
        for layout, plain in zip(found, in_order, strict=True):
            assert np.array_equal(layout.q_rows, plain.q_rows)
            assert np.array_equal(layout.first, plain.first) and np.array_equal(layout.last, plain.last)
            # Carried rows are where the previous half put them.
            for (document, start, stop, rank, row), tensor in (
                (shard, home_rows(layout, "kv")[shard[3]]) for shard in zip(*layout.kv.columns(), strict=True)
            ):
                assert 0 <= rank < ranks
                assert tensor[row : row + stop - start].tolist() == [[document, p] for p in range(start, stop)]


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
def test_real_mixes_are_nearly_balanced_at_home_and_move_fewer_bytes(mix: str, ranks: int) -> None:
    for seed in range(3):
        documents = sample_lengths(mix, ranks * 131072, seed)
        (plain,), (found,) = (
            lay_out(documents, ranks, placement=placement, cost=LLAMA_8B)
            for placement in ("in_order", "spread_by_nano_batch")
        )
        assert home_imbalance(found, LLAMA_8B) < min(1.06, home_imbalance(plain, LLAMA_8B))
        assert kilobytes(schedule(found, LLAMA_8B)) < 0.8 * kilobytes(schedule(plain, LLAMA_8B))


def test_parts_of_a_long_document_are_neighbours() -> None:
    # One document with the work of many ranks: its parts lie on consecutive ranks, so most of its keys stay on a node.
    documents = [100_000, *[1000] * 300]
    (layout,) = lay_out(documents, 8, placement="spread_by_nano_batch", cost=LLAMA_8B)
    parts = layout.q.document == 0
    assert parts.sum() >= 6
    # All but the head, which is dealt like any other document.
    assert (np.diff(layout.q.rank[parts])[1:] == 1).all()


def test_uneven_budgets_are_met() -> None:
    stream = Stream(np.arange(3), np.zeros(3, np.int64), np.array([50, 7, 3]))
    for budgets in ([20, 20, 20, 0], [60, 0, 0, 0], [1, 1, 29, 29]):
        placed, rank = spread(stream, np.array(budgets), area_cost())
        assert np.bincount(rank, weights=placed.stop - placed.start, minlength=4).tolist() == budgets
