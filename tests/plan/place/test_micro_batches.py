import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.data.mixes import Mix, sample_lengths, sample_long_context
from distca.errors import PlanError
from distca.plan import PlanOptions, analytic_cost, deal_over_micro_batches, plan_at_home, plan_step, server_seconds
from distca.plan.cost.linear import NonAttention

LLAMA_8B = analytic_cost(32, 8, 128)


@given(
    st.lists(st.integers(1, 400), max_size=40),
    st.lists(st.integers(0, 1500), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_every_document_is_in_one_micro_batch_that_has_room(lengths: list[int], room: list[int], stages: int) -> None:
    found = deal_over_micro_batches(lengths, room, stages)
    if found is None:
        # Whoever has that much room left in all, and documents that small, cannot have failed.
        assert sum(lengths) + max(lengths) * len(room) > sum(room)
        return
    assert len(found) == len(room)
    assert sorted(int(document) for each in found for document in each) == list(range(len(lengths)))
    for each, most in zip(found, room, strict=True):
        assert np.array(lengths, np.int64)[each].sum() <= most
        assert (np.diff(each) > 0).all()
    again = deal_over_micro_batches(np.array(lengths, np.int64), room, stages)
    assert again is not None
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


@given(
    st.lists(st.integers(1, 6), max_size=40), st.lists(st.integers(0, 90), min_size=1, max_size=5), st.integers(1, 3)
)
def test_documents_of_one_length_go_where_each_by_itself_would(
    lengths: list[int], room: list[int], stages: int
) -> None:
    turn = sorted(range(len(room)), key=lambda at: min(at, len(room) - 1 - at) if stages > 1 else at)
    left, wanted = list(room), [[] for _ in room]
    for document in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        at = next((at for at in turn if left[at] >= lengths[document]), None)
        if at is None:
            assert deal_over_micro_batches(lengths, room, stages) is None
            return
        left[at] -= lengths[document]
        wanted[at].append(document)
    found = deal_over_micro_batches(lengths, room, stages)
    assert found is not None and [each.tolist() for each in found] == [sorted(each) for each in wanted]


@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
def test_less_is_left_to_move(mix: Mix) -> None:
    options = PlanOptions(16, LLAMA_8B, nano_batches=2, tolerance=0.02)
    dealt_bytes = drawn_bytes = 0
    for seed in range(3):
        drawn = [sample_lengths(mix, 16 * 131_072, 10 * seed + number) for number in range(4)]
        plain = plan_step(drawn, options)
        dealt = plan_step(drawn, options, room=[16 * 131_072 + 2048] * 4)
        assert dealt.tokens == plain.tokens
        for lengths, origin in zip(dealt.lengths, dealt.drawn, strict=True):
            assert lengths.tolist() == [drawn[at][document] for at, document in origin.tolist()]
        for found in (plain, dealt):
            everything = np.concatenate(found.drawn)
            assert len(np.unique(everything, axis=0)) == len(everything) == sum(len(each) for each in drawn)
        dealt_bytes += dealt.balance().bytes_moved
        drawn_bytes += plain.balance().bytes_moved
    assert dealt_bytes < 0.8 * drawn_bytes


@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
def test_stages_wait_less(mix: Mix) -> None:
    """Idle stages compute attention while the pipeline fills and drains, if there is enough of it then."""
    row = NonAttention(2e-7, 4e-7)
    options = PlanOptions(2, LLAMA_8B, stages=4, nano_batches=2, resend=True, non_attention=row, tolerance=0.02)
    took = np.zeros(2)
    for seed in range(3):
        drawn = [sample_lengths(mix, 2 * 131_072, 10 * seed + number) for number in range(8)]
        for at, room in enumerate((None, [2 * 131_072 + 2048] * 8)):
            balance = plan_step(drawn, options, room=room).balance()
            took[at] += (balance.seconds_after + balance.other_seconds).max(axis=1).sum()
    assert took[1] < 0.98 * took[0]


@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
def test_small_budgets_are_level_in_backward_too(mix: Mix) -> None:
    """No cut of backward that adds less than a quarter of its time fits into what servers lack there."""
    options, over, mean, alone = PlanOptions(4, LLAMA_8B, stages=2, nano_batches=2, resend=True), 0.0, 0.0, 0.0
    for seed in range(2):
        drawn = [sample_long_context(mix, 4 * 16_384, 16_384, 10 * seed + number) for number in range(4)]
        for phase in plan_step(drawn, options).backward:
            seconds = sum(server_seconds(plan, LLAMA_8B, "backward") for plan in phase.plans)
            over, mean = over + seconds.max(), mean + seconds.mean()
            alone += sum(server_seconds(plan_at_home(plan.layout), LLAMA_8B, "backward").mean() for plan in phase.plans)
    assert over < 1.05 * mean
    # What cuts add is less than they save.
    assert over < 1.1 * alone


def test_with_stages_the_longest_are_first_and_last() -> None:
    assert [each.tolist() for each in deal_over_micro_batches([3, 9, 4, 8, 5], [9, 9, 9, 9], stages=2) or []] == [
        [1],
        [2, 4],
        [0],
        [3],
    ]


def test_a_step_is_dealt_into_the_room_that_it_has() -> None:
    options = PlanOptions(2, LLAMA_8B)
    with pytest.raises(PlanError, match="room is for 1 micro-batches, and the step has 2"):
        plan_step([[5], [7]], options, room=[12])
    with pytest.raises(PlanError, match="give homes or room, not both"):
        plan_step([[5], [7]], options, [[0], [1]], room=[7, 7])
    assert [each.tolist() for each in plan_step([[5, 2], [7]], options, room=[9, 9]).lengths] == [[7], [5, 2]]
    # Without a place for each they stay where they are.
    assert [each.tolist() for each in plan_step([[5, 2], [7]], options, room=[6, 8]).lengths] == [[5, 2], [7]]


@pytest.mark.parametrize(
    "lengths, room, words",
    [
        ([5], [], "at least one micro-batch"),
        ([5], [-1], "each with 0 tokens or more"),
        ([5, 0], [9], "Document 1 has 0 tokens"),
    ],
)
def test_mistakes_are_sentences(lengths: list[int], room: list[int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        deal_over_micro_batches(lengths, room)
