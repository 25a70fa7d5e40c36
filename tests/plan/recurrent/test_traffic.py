"""What is counted of all ranks at once, against the routes of every rank."""

from collections.abc import Sequence

import numpy as np
import pytest

from distca.plan import Layout, lay_out
from distca.plan.metrics import PairRows
from distca.plan.recurrence import Recurrence
from distca.plan.recurrent.chains import ChainRoute
from distca.plan.recurrent.routes import PieceRoute, piece_routes
from distca.plan.recurrent.traffic import Summaries, recurrent_nanos
from tests.plan.recurrent.cases import cut_anywhere, random_cuts


def table(pairs: PairRows) -> np.ndarray:
    found = np.zeros((pairs.ranks, pairs.ranks), np.int64)
    found[pairs.home, pairs.server] = pairs.rows
    return found


def check_summaries(found: Summaries, chains: Sequence[ChainRoute]) -> None:
    for pairs, read, name in (
        (found.states, found.read, "states"),
        (found.transitions, found.read_transitions, "transitions"),
    ):
        exchanges = [getattr(chain, name) for chain in chains]
        assert table(pairs).tolist() == [each.send.per_peer(len(chains)).tolist() for each in exchanges]
        assert read.tolist() == [each.destination_rows for each in exchanges]


def check(placed: tuple[Layout, ...], width: int) -> None:
    ranks = placed[0].ranks
    routes: list[tuple[PieceRoute, ...]] = [piece_routes(placed, rank, width) for rank in range(ranks)]
    for number, half in enumerate(recurrent_nanos(placed, width)):
        of_ranks = [route[number] for route in routes]
        check_summaries(half.forward, [each.forward for each in of_ranks])
        check_summaries(half.backward, [each.backward for each in of_ranks])
        assert table(half.halo).tolist() == [each.halo.exchange.send.per_peer(ranks).tolist() for each in of_ranks]
        for name, opens, closes in (
            ("only", True, True),
            ("first", True, False),
            ("inner", False, False),
            ("last", False, True),
        ):
            chosen = [(each.opens == opens) & (each.closes == closes) for each in of_ranks]
            rows = [int((each.end - each.begin)[some].sum()) for each, some in zip(of_ranks, chosen, strict=True)]
            assert getattr(half, name).tolist() == rows
        assert half.continuing.tolist() == [int((~each.opens).sum()) for each in of_ranks]
        assert half.between.tolist() == [int((~each.opens & ~each.closes).sum()) for each in of_ranks]


@pytest.mark.parametrize("seed", range(20))
def test_documents_cut_anywhere(seed: int) -> None:
    check(cut_anywhere(random_cuts(seed), 1 + seed % 5, seed), width=1 + seed % 4)


def test_documents_as_the_planner_places_them() -> None:
    check(lay_out([900, 30, 4, 1, 300, 2000], 6, nano_batches=2), width=3)


def test_bytes_of_a_document_of_three_pieces_by_hand() -> None:
    """The first piece sends its state to both others, the inner one its whole summary to the last; backward is the
    mirror. Three rows of a halo travel to each piece behind the first, and their gradients back."""
    what = Recurrence.gated_delta_net(2, 4, 8, 16)
    (half,) = recurrent_nanos(lay_out([30], 3), what.halo_rows)
    state, transition, row = 4 * 4 * 8 * 16, 4 * 4 * 8 * 8, 2 * (2 * 2 * 8 + 4 * 16)
    assert (what.state_bytes, what.transition_bytes) == (state, transition)
    assert half.forward.read_bytes(what).tolist() == [0, state, 2 * state + transition]
    assert half.travelling_bytes(what) == 2 * (3 * state + transition) + 2 * 6 * row


def test_summaries_of_qwen_take_what_the_page_says() -> None:
    nine, large = (Recurrence.gated_delta_net(16, heads, 128, 128) for heads in (32, 48))
    assert nine.state_bytes == nine.transition_bytes == 2 << 20
    assert large.state_bytes + large.transition_bytes == 6 << 20
    assert [what.halo_rows * what.channels * 2 // 1024 for what in (nine, large)] == [48, 60]
    mamba = Recurrence.mamba2(8, 64, 128, 64)
    assert mamba.transition_bytes == 4 * 64
