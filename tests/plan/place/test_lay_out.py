import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.errors import PlanError
from distca.plan import Layout, lay_out
from tests.plan.cases import home_rows, lengths


def covered(layouts: tuple[Layout, ...]) -> list[tuple[int, int]]:
    """Every (document, position) computed in some nano-batch."""
    return sorted(tuple(row) for layout in layouts for tensor in home_rows(layout, "q") for row in tensor.tolist())


@given(
    lengths, st.integers(1, 6), st.sampled_from((1, 2)), st.sampled_from((1, 4)), st.sampled_from(("in_order", "even"))
)
def test_every_token_has_one_home_row(
    documents: list[int], ranks: int, nano_batches: int, align: int, dealing: str
) -> None:
    layouts = lay_out(documents, ranks, nano_batches=nano_batches, align=align, dealing=dealing)
    assert len(layouts) == nano_batches
    assert covered(layouts) == [(d, p) for d, length in enumerate(documents) for p in range(length)]
    for layout in layouts:
        assert layout.tokens == layout.q_rows.sum()
        # All ranks but those at the end hold multiples of align, and differ by at most one unit.
        full = layout.q_rows[layout.q_rows.cumsum() < layout.tokens]
        assert (full % align == 0).all()
        units = -(-layout.q_rows // align)
        assert units.max() - units.min() <= 1


@given(st.data(), lengths, st.integers(1, 6), st.sampled_from((1, 2)), st.sampled_from(("in_order", "even")))
def test_whole_documents_stay_on_their_rank(
    data: st.DataObject, documents: list[int], ranks: int, nano_batches: int, dealing: str
) -> None:
    homes = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(documents), max_size=len(documents)))
    layouts = lay_out(documents, ranks, nano_batches=nano_batches, rank_of=homes, dealing=dealing)
    assert covered(layouts) == [(d, p) for d, length in enumerate(documents) for p in range(length)]
    for layout in layouts:
        assert (layout.q.rank == np.array(homes, np.int64)[layout.q.document]).all()
    if nano_batches == 2:
        ping, pong = layouts
        half = -(-(ping.q_rows + pong.q_rows) // 2)
        assert (half <= ping.q_rows).all() and (ping.q_rows <= half * (1 + 1 / 32)).all()
        # More than half only where a document ends there, so that none of the rank's is cut.
        assert not pong.carried_rows[ping.q_rows > half].any()


@given(lengths, st.integers(1, 6), st.sampled_from(("in_order", "even")))
def test_pong_holds_all_keys_its_queries_need(documents: list[int], ranks: int, dealing: str) -> None:
    ping, pong = lay_out(documents, ranks, nano_batches=2, dealing=dealing)
    held = sorted(tuple(row) for tensor in home_rows(pong, "kv") for row in tensor.tolist())
    needed = [(d, p) for d in range(len(documents)) if pong.first[d] < pong.last[d] for p in range(pong.last[d])]
    assert held == needed
    for rank, (own, keys) in enumerate(zip(home_rows(pong, "q"), home_rows(pong, "kv"), strict=True)):
        carried = int(pong.carried_rows[rank])
        assert np.array_equal(keys[carried:], own)
        assert np.array_equal(keys[:carried], home_rows(ping, "q")[rank][len(home_rows(ping, "q")[rank]) - carried :])


@given(
    lengths.filter(len), st.integers(1, 3), st.sampled_from((1, 4)), st.sampled_from(("in_order", "even")), st.data()
)
def test_no_short_tail_of_a_document_is_left_for_pong(
    documents: list[int], ranks: int, align: int, dealing: str, data: st.DataObject
) -> None:
    # Long documents and short ones, and as many tokens as fill two halves of all ranks.
    documents = [length * data.draw(st.sampled_from((1, 30))) for length in documents]
    unit = 2 * ranks * align
    documents.append(unit - sum(documents) % unit)
    half = sum(documents) // 2
    layouts = lay_out(documents, ranks, nano_batches=2, align=align, dealing=dealing)
    ping, pong = layouts
    assert half <= ping.tokens <= half * (1 + 1 / 32)
    assert (ping.q_rows + pong.q_rows == sum(documents) // ranks).all()
    tail = (pong.last - pong.first)[pong.first > 0]
    head = pong.first[pong.first > 0]
    assert len(tail) <= 1
    # A multiple of the ranks' rows may lie in the next document, of which the head is then short, or be too far away.
    assert (tail > head / 32).all() or (head < ranks * align).all() or (tail + ranks * align > half / 32).all()


@pytest.mark.parametrize("lengths, ranks, align", [([5, 5], 4, 1), ([1000, 1000], 16, 8), ([1, 1], 4, 1)])
def test_halves_that_end_with_a_document_stay(lengths: list[int], ranks: int, align: int) -> None:
    ping, pong = lay_out(lengths, ranks, nano_batches=2, align=align)
    assert ping.tokens == pong.tokens == lengths[0]
    assert pong.carried_rows.sum() == 0


def test_a_whole_document_that_nearly_ends_with_its_ranks_half_is_not_cut() -> None:
    ping, pong = lay_out([1000, 990, 7], 2, nano_batches=2, rank_of=[0, 0, 1])
    assert ping.q_rows.tolist() == [1000, 4]
    assert pong.carried_rows.tolist() == [0, 4]


def test_a_half_that_two_documents_nearly_fill_holds_both() -> None:
    # 35 tokens of the second one alone would need all its keys again.
    documents = [131_072] * 3 + [1000] * 131
    ping, pong = lay_out(documents, 4, nano_batches=2, dealing="even")
    assert sum(documents) // 2 < 2 * 131_072 == ping.tokens
    assert pong.carried_rows.sum() == 0


def test_even_dealing_evens_out_the_work_of_the_halves() -> None:
    documents = np.random.default_rng(0).choice([300, 400, 500, 9000, 20000, 60000], size=400)

    def work(dealing: str) -> float:
        halves = [float((x.last.astype(float) ** 2 - x.first.astype(float) ** 2).sum())
                  for x in lay_out(np.sort(documents), 8, nano_batches=2, dealing=dealing)]  # fmt: skip
        return max(halves) / sum(halves)

    assert work("in_order") > 0.6
    assert work("even") < 0.505


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"lengths": [3], "ranks": 0}, "at least one rank"),
        ({"lengths": [3, 0], "ranks": 1}, "Document 1 has 0 tokens"),
        ({"lengths": [3], "ranks": 1, "nano_batches": 3}, "1 or 2 nano-batches, not 3"),
        ({"lengths": [3], "ranks": 1, "align": 0}, "align is 0"),
        ({"lengths": [3], "ranks": 1, "dealing": "odd"}, "dealing is 'odd'"),
        ({"lengths": [3], "ranks": 1, "placement": "odd"}, "placement is 'odd'"),
        ({"lengths": [3], "ranks": 2, "rank_of": [2]}, "names rank 2, but the 2 ranks are 0 to 1"),
        ({"lengths": [3], "ranks": 2, "rank_of": [-1]}, "names rank -1"),
        ({"lengths": [3], "ranks": 2, "rank_of": [0, 1]}, "2 home ranks for 1 documents"),
    ],
)
def test_mistakes_are_sentences(arguments: dict, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        lay_out(**arguments)
