import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.data.mixes import long_context, sample_lengths, sample_mix
from distca.plan import (
    Links,
    analytic_cost,
    area_cost,
    context_rows,
    imbalance,
    lay_out,
    plan_at_home,
    plan_micro_batch,
    route,
    schedule,
    server_seconds,
    traffic,
)
from distca.plan.cost.model import CostModel
from distca.plan.place.home_rows import home_rows as rows_of
from distca.plan.place.lay_out import Placement
from distca.plan.place.shares import ONE_BY_ONE, deal, work_of
from tests.plan.cases import home_imbalance, home_rows, kilobytes, lengths

LLAMA_8B = analytic_cost(32, 8, 128)
SPREAD: dict[str, Any] = {"nano_batches": 2, "dealing": "lean", "placement": "spread", "cost": LLAMA_8B}


@given(
    lengths.filter(len),
    st.integers(1, 6),
    st.sampled_from((1, 3)),
    st.sampled_from((area_cost(), LLAMA_8B)),
    st.sampled_from(("even", "lean")),
)
def test_every_token_is_placed_once_and_every_budget_is_met_exactly(documents, ranks, align, cost, dealing) -> None:
    for nano_batches in (1, 2):
        options = {"nano_batches": nano_batches, "align": align, "dealing": dealing, "cost": cost}
        options["ranks_per_node"] = align - 1
        found = lay_out(documents, ranks, placement="spread", **options)
        rows = [tuple(row) for layout in found for tensor in home_rows(layout, "q") for row in tensor.tolist()]
        assert sorted(rows) == [(d, p) for d, length in enumerate(documents) for p in range(length)]
        assert not found[0].first.any()
        assert np.max([layout.last for layout in found], axis=0).tolist() == documents
        half = -(-sum(documents) // (2 * align)) * align
        most = sum(documents) if nano_batches == 1 else min(half, sum(documents))
        # Where shares cannot be cut so, both halves are in order, and ping takes a short tail.
        assert most <= found[0].tokens <= most * (1 + 1 / 32)
        for layout in found:
            # Equal rows for all ranks, in units of align; only ranks at the end may lack some.
            units = -(-layout.q_rows // align)
            assert units.max() - units.min() <= 1
            assert (layout.q_rows[layout.q_rows.cumsum() < layout.tokens] % align == 0).all()
            # Carried rows are where the previous half put them.
            for (document, start, stop, rank, row), tensor in (
                (shard, home_rows(layout, "kv")[shard[3]]) for shard in zip(*layout.kv.columns(), strict=True)
            ):
                assert 0 <= rank < ranks
                assert tensor[row : row + stop - start].tolist() == [[document, p] for p in range(start, stop)]


@given(lengths.filter(len), st.integers(1, 6))
def test_the_same_documents_are_always_placed_alike(documents: list[int], ranks: int) -> None:
    a, b = (lay_out(documents, ranks, placement="spread", nano_batches=2) for _ in range(2))
    for one, other in zip(a, b, strict=True):
        columns = zip(dataclasses.astuple(one.q), dataclasses.astuple(other.q), strict=True)
        assert all(np.array_equal(x, y) for x, y in columns)


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
def test_real_mixes_are_nearly_balanced_at_home_and_move_fewer_bytes_in_two_halves(mix: str, ranks: int) -> None:
    for seed in range(3):
        documents = sample_lengths(mix, ranks * 131072, seed)
        (plain,), (found,) = (
            lay_out(documents, ranks, placement=placement, cost=LLAMA_8B) for placement in ("in_order", "spread")
        )
        assert home_imbalance(found, LLAMA_8B) < min(1.06, home_imbalance(plain, LLAMA_8B))
        busiest = [traffic(schedule(each, LLAMA_8B)).busiest(2, 2, 1).max() for each in (found, plain)]
        assert busiest[0] < 0.8 * busiest[1]
        plain_bytes, found_bytes = (
            sum(kilobytes(schedule(half, LLAMA_8B)) for half in halves)
            for halves in (
                lay_out(documents, ranks, nano_batches=2, dealing=dealing, placement=placement, cost=LLAMA_8B)
                for dealing, placement in (("even", "in_order"), ("lean", "spread"))
            )
        )
        assert found_bytes < 0.8 * plain_bytes


@pytest.mark.parametrize("placement", ["spread", "spread_by_nano_batch"])
def test_both_halves_are_balanced_and_a_carried_document_is_found(placement: Placement) -> None:
    documents = np.append(sample_lengths("pretrain", 8 * 131072, 3), 300_000)
    for layout in lay_out(documents, 8, nano_batches=2, dealing="even", placement=placement, cost=LLAMA_8B):
        assert home_imbalance(layout, LLAMA_8B) < 1.15
    layouts = lay_out([300_000, 5000], 4, nano_batches=2, placement=placement, cost=LLAMA_8B)
    assert layouts[1].carried_rows.sum() > 0


@pytest.mark.parametrize("placement", ["spread", "spread_by_nano_batch"])
def test_budgets_full_of_long_documents_still_move_fewer_bytes(placement: Placement) -> None:
    drawn = long_context(sample_lengths("prolong", 64 * 131072, 0), 262144, 0)
    documents = drawn[: int(np.searchsorted(np.cumsum(drawn), 16 * 131072))]
    plain, found = (
        schedule(lay_out(documents, 16, placement=how, cost=LLAMA_8B)[0], LLAMA_8B) for how in ("in_order", placement)
    )
    assert kilobytes(found) < kilobytes(plain)


def test_shares_of_a_long_document_have_equal_work_and_stay_on_a_node() -> None:
    documents = [100_000, *[1000] * 300]
    (layout,) = lay_out(documents, 16, placement="spread", ranks_per_node=8)
    rows = np.bincount(layout.q.rank, (layout.q.stop - layout.q.start) * (layout.q.document == 0), 16)
    readers = np.flatnonzero(rows)
    assert len(readers) >= 12
    assert (np.diff(readers) == 1).all()
    documents = [*[1000] * 10, *[10] * 30_000]
    (layout,) = lay_out(documents, 16, placement="spread", ranks_per_node=8)
    nodes = [len(set((layout.q.rank[layout.q.document == document] // 8).tolist())) for document in range(10)]
    assert sum(nodes) <= 11, "one document at most is on both nodes"
    assert imbalance(server_seconds(plan_at_home(layout), area_cost(), "forward")) < 1.02


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_documents_of_exactly_one_rank_move_nothing_in_two_halves(ranks: int) -> None:
    plan = plan_micro_batch([131_072] * ranks, ranks, LLAMA_8B, nano_batches=2)
    assert plan.bytes_moved.total == 0
    assert plan.imbalance_after < 1.0001
    ping, pong = plan.nano_batches
    assert ping.layout.tokens == pong.layout.tokens == ranks * 65_536


def test_nodes_first_moves_few_rows_between_nodes() -> None:
    total = np.zeros(2)
    for seed in range(4):
        documents = sample_lengths("pretrain", 32 * 131072, seed)
        node = np.arange(32) // 8
        for number, size in enumerate((0, 8)):
            found = lay_out(documents, 32, placement="spread", cost=LLAMA_8B, ranks_per_node=size)[0]
            assert home_imbalance(found, LLAMA_8B) < 1.1
            total[number] += traffic(plan_at_home(found)).between(node).kv_rows
    assert total[1] < 0.5 * total[0]


def test_no_rank_sends_a_long_head_to_all_others() -> None:
    documents = np.append(np.full(2000, 1000), 300_000)
    plan = plan_micro_batch(documents, 32, LLAMA_8B, nano_batches=2)
    sent = sum(traffic(nano.forward).kv.sent for nano in plan.nano_batches)
    assert sent.max() < 1.6 * sent.mean()


def test_both_halves_together_need_about_as_many_keys_everywhere() -> None:
    # Who computes the last rows of a document, which need all its keys, gets those with fewest in the other half.
    documents = [131_072, 131_072, *[1000] * 262]
    plan = plan_micro_batch(documents, 4, LLAMA_8B, nano_batches=2, tolerance=0.005)
    keys = np.array(
        [[route(half.forward, rank).kv.destination_rows for rank in range(4)] for half in plan.nano_batches]
    )
    assert keys.max() > 1.5 * keys.min()
    assert keys.sum(axis=0).max() < 1.15 * keys.sum(axis=0).min()


@given(
    lengths.filter(len), st.lists(st.integers(0, 100), min_size=1, max_size=6), st.sampled_from((area_cost(), LLAMA_8B))
)
def test_any_budgets_are_met(documents: list[int], parts: list[int], cost: CostModel) -> None:
    total, ranks = sum(documents), len(parts)
    ends = np.cumsum(np.array(parts) + 1) * total // (sum(parts) + ranks)
    budgets = np.diff(ends, prepend=0)
    budgets[-1] += total - budgets.sum()
    length = np.array(documents)
    work = work_of(np.zeros_like(length), length, ranks, cost)
    for nodes in (1, 2):
        node = np.arange(ranks) * nodes // ranks
        dealt = deal(length, budgets, work, node, 1)
        ((stream, rank),) = rows_of(length, dealt, [budgets], work, node)
        assert np.bincount(rank, stream.stop - stream.start, ranks).tolist() == budgets.tolist()
        ranges = zip(stream.document.tolist(), stream.start.tolist(), stream.stop.tolist(), strict=True)
        found = sorted((document, p) for document, start, stop in ranges for p in range(start, stop))
        assert found == [(document, p) for document, own in enumerate(documents) for p in range(own)]


@pytest.mark.parametrize("context, servers", [(524_288, 64), (1_048_576, 128)])
def test_no_rank_has_far_more_to_move_than_others_at_long_contexts(context: int, servers: int) -> None:
    documents = sample_mix("prolong-long", servers * 131_072, 0, context=context)
    plan = plan_micro_batch(documents, servers, LLAMA_8B, nano_batches=2, links=Links(8))
    moved = np.sum([traffic(half.forward).busiest(8, 8, 4) for half in plan.nano_batches], axis=0)
    assert imbalance(moved) < 2.0
    assert max(imbalance(server_seconds(half.forward, LLAMA_8B, "both")) for half in plan.nano_batches) <= 1.02


@pytest.mark.parametrize(
    "mix, context", [("pretrain-long", 131_072), ("prolong-long", 131_072), ("prolong-long", 524_288)]
)
def test_no_rank_keeps_far_more_keys_than_others(mix: str, context: int) -> None:
    for seed in range(2):
        documents = sample_mix(mix, 64 * 131_072, seed, context=context)
        plan = plan_micro_batch(documents, 64, LLAMA_8B, nano_batches=2, links=Links(8))
        kept = sum(context_rows(half.forward)[0] for half in plan.nano_batches)
        assert imbalance(kept) < 1.5 or kept.max() < 1.4 * context
        readers = np.zeros(64)
        for document in np.flatnonzero(documents > 65_536):
            homes = [half.layout.q.rank[half.layout.q.document == document] for half in plan.nano_batches]
            readers[np.unique(np.concatenate(homes))] += 1
        assert readers.max() <= 3 or context > 131_072


@pytest.mark.parametrize(
    "mix, context, servers, seed, most",
    [
        # 6.9 where ranks get slivers of long documents, 6.4 where receivers are not asked by what they keep.
        ("pretrain-long", 524_288, 32, 4, 6.1),
        # 10.7 where pieces that a budget cuts off go to ranks with most room.
        ("prolong-long", 1_048_576, 64, 0, 10.0),
    ],
)
def test_keys_go_where_few_are_kept(mix: str, context: int, servers: int, seed: int, most: float) -> None:
    """``most`` of what the fullest rank keeps, over its tokens."""
    documents = sample_mix(mix, servers * 131_072, seed, context=context)
    plan = plan_micro_batch(documents, servers, LLAMA_8B, nano_batches=2, links=Links(8))
    kept = sum(context_rows(half.forward)[0] for half in plan.nano_batches)
    assert kept.max() < most * 131_072


@pytest.mark.parametrize("nano_batches", [1, 2])
def test_documents_of_one_length_that_no_rank_has_room_for(nano_batches: int) -> None:
    """The last of them fill ranks up, and bring as much work per token as the others."""
    documents = np.full(48, 300_000)
    with np.errstate(divide="raise", invalid="raise"):
        plan = plan_micro_batch(documents, 64, LLAMA_8B, nano_batches=nano_batches, links=Links(8))
    moved = sum(kilobytes(half.forward) for half in plan.nano_batches)
    assert moved < 4 * documents.sum()


def test_ranks_that_read_most_keys_have_inner_rows_of_long_documents_in_pong() -> None:
    documents = sample_mix("pretrain-long", 64 * 131_072, 0, context=524_288)
    pong = lay_out(documents, 64, **SPREAD, ranks_per_node=8)[1].q
    long = np.flatnonzero(documents > 131_072)
    readers = [np.unique(pong.rank[pong.document == document]) for document in long]
    keys = np.zeros(64)
    for document, ranks in zip(long, readers, strict=True):
        keys[ranks] += documents[document]
    differ = 0
    for document, ranks in zip(long, readers, strict=True):
        read = [pong.stop[(pong.document == document) & (pong.rank == rank)].max() for rank in ranks]
        differ += len(set(keys[ranks])) > 1
        assert read[keys[ranks].argmax()] < 0.85 * documents[document] or len(set(keys[ranks])) == 1
    assert differ >= 5


def test_a_document_that_no_rank_has_room_for_leaves_others_where_they_fit() -> None:
    length = np.array([100, 40, 38, 14, 12, 8, 4])
    dealt = deal(length, np.full(4, 54), lambda start, stop: (stop - start) / 54, np.zeros(4, np.int64), 1)
    shares = np.bincount(dealt.shares.document, minlength=7)
    assert shares[1:5].tolist() == [1, 1, 1, 1]
    assert shares[0] >= 2


def test_where_rows_are_scarce_ping_gets_whole_documents_rather_than_heads_of_all() -> None:
    from distca.plan.place.head_cuts import _Documents, _OnRank

    rows, work = [40, 30, 20], [1600.0, 900.0, 400.0]
    cuts, missing = _OnRank(rows, work, work, [0.0] * 3, ping=50, pong=60).cuts(2200.0)
    assert sum(cuts) <= 50 and 90 - sum(cuts) <= 60
    dense = np.array(work) / np.array(rows) ** 2
    documents = _Documents(np.zeros(3, np.int64), np.array(rows), np.array(work), np.zeros(3), dense)
    (ping, pong), wanted = (np.array([50.0]), np.array([60.0])), np.array([2200.0])
    heads = documents.heads(wanted, ping, pong)
    assert heads.sum() <= 50 and 90 - heads.sum() <= 60
    (reached,) = documents.surplus_of(np.array(cuts), 1)
    assert reached == 2200 - missing >= 1600 > documents.surplus_of(heads, 1)[0]


@pytest.mark.parametrize("placement", ["spread", "spread_by_nano_batch"])
@pytest.mark.parametrize("nano_batches", [1, 2])
def test_documents_in_hundreds_of_thousands_are_level_though_only_the_longest_are_dealt(
    placement: Placement, nano_batches: int
) -> None:
    """They are given from the shortest to the longest: laid end to end they would not be."""
    documents = np.repeat(np.arange(1, 17), 10_000)
    found = lay_out(documents, 8, nano_batches=nano_batches, dealing="even", placement=placement, cost=LLAMA_8B)
    assert all(home_imbalance(layout, LLAMA_8B) < 1.02 for layout in found)


def test_only_so_many_documents_are_dealt_one_by_one() -> None:
    ones, ranks = np.ones(300_000, np.int64), 32
    budgets = np.full(ranks, len(ones) // ranks)
    dealt = deal(ones, budgets, work_of(np.zeros_like(ones), ones, ranks, LLAMA_8B), np.zeros(ranks, np.int64), 2)
    assert len(dealt.shares.document) == ONE_BY_ONE * ranks
    assert np.array_equal(np.sort(np.concatenate((dealt.shares.document, dealt.short))), np.arange(len(ones)))
