"""A step made from documents: every token on one rank with what belongs to it."""

from __future__ import annotations

import numpy as np
import pytest

from distca.data.batch import RankBatch, rank_batch
from distca.errors import DataError, PlanError
from distca.plan import PlanOptions, area_cost

LENGTHS = ((40, 3, 1, 21), (30, 31, 2, 1), (66,))
RANKS = 4


def _documents() -> list[list[np.ndarray]]:
    """A token says its document and its position."""
    numbers = iter(range(1, 100))
    return [[1000 * next(numbers) + np.arange(length) for length in lengths] for lengths in LENGTHS]


def _options(stages: int, disaggregate: bool = True, align: int = 1) -> PlanOptions:
    return PlanOptions(
        RANKS,
        area_cost(4, 2, 8),
        stages=stages,
        nano_batches=2 if disaggregate else 1,
        align=align,
        shares=align,
        resend=stages > 1 and disaggregate,
        disaggregate=disaggregate,
    )


def test_documents_that_span_ranks_are_refused_on_every_rank_where_attention_stays_at_home() -> None:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    for rank in range(RANKS):
        with pytest.raises(PlanError, match="Document 0 of a micro-batch, of 40 tokens, spans data-parallel ranks"):
            make_step(StepDocuments(_documents()), _options(1, disaggregate=False), Taker(0, rank, "cpu"))


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    known = StepDocuments([[np.array([0, 8, 9])]])
    make_step(known, _options(1), Taker(0, 0, "cpu", vocabulary=10))
    for token, vocabulary in ((9, 9), (-1, 9)):
        with pytest.raises(DataError, match=f"has token {token}, but the model has ids 0 to 8"):
            make_step(StepDocuments([[np.array([token] * 40)]]), _options(1), Taker(0, 0, "cpu", vocabulary=vocabulary))


@pytest.mark.parametrize("room", [0, 100])
def test_a_document_with_such_a_token_is_named_as_it_was_given(room: int) -> None:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    documents = [[np.zeros(3, int), np.zeros(2, int)], [np.zeros(4, int), np.full(60, 9)], [np.zeros(50, int)]]
    with pytest.raises(DataError, match=r"^Document 1 of micro-batch 1 has token 9, but the model has ids 0 to 8"):
        make_step(StepDocuments(documents), _options(1), Taker(0, 0, "cpu", vocabulary=9), room=room)


@pytest.mark.parametrize("stages,disaggregate", [(1, True), (1, False), (2, True), (2, False)])
def test_every_token_is_on_one_rank_with_what_belongs_to_it(stages: int, disaggregate: bool) -> None:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    homes = None if disaggregate else [np.arange(len(lengths)) % RANKS for lengths in LENGTHS]
    documents = StepDocuments(_documents(), homes, note="where the sampler stood")
    seen: list[list[int]] = [[] for _ in LENGTHS]
    shapes = set()
    for rank in range(RANKS):
        step = make_step(documents, _options(stages, disaggregate), Taker(stages - 1, rank, "cpu"))
        assert step.documents.note == "where the sampler stood" and step.planning_ms > 0
        for number, batch in enumerate(step.batches):
            tokens, labels, mask, positions = (
                x[0] for x in (batch.tokens, batch.labels, batch.loss_mask, batch.positions)
            )
            assert (labels[mask] == tokens[mask] + 1).all()
            assert (positions == (tokens % 1000)).all()
            seen[number] += tokens[tokens > 0].tolist()
        shapes.add((rank, len({batch.tokens.shape for batch in step.batches})))
    for owned, tokens in zip(_documents(), seen, strict=True):
        assert sorted(tokens) == np.sort(np.concatenate(owned)).tolist()
    if stages > 1 and not disaggregate:
        assert {count for _, count in shapes} == {1}, "1F1B moves activations of one size"


def test_documents_are_dealt_over_micro_batches_anew_into_their_room() -> None:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    weights = [np.array([document[0] // 1000 for document in each], np.float32) for each in _documents()]
    documents = StepDocuments(_documents(), [None] * len(LENGTHS), note="kept", weights=weights)
    steps = [make_step(documents, _options(1), Taker(0, rank, "cpu"), room=70) for rank in range(RANKS)]
    found = steps[0].documents
    assert [[len(document) for document in each] for each in found.micro_batches] == [
        [1, 66],
        [40, 3, 21, 2, 1],
        [30, 31],
    ]
    assert found.note == "kept"
    for number, dealt in enumerate(found.micro_batches):
        tokens = np.concatenate([step.batches[number].tokens[0].numpy() for step in steps])
        assert sorted(tokens[tokens > 0].tolist()) == np.sort(np.concatenate(dealt)).tolist()
        learned = np.concatenate([step.batches[number].loss_mask[0].numpy() for step in steps])
        assert (learned > 0).any() and (learned == np.where(learned > 0, tokens // 1000, 0)).all()
    whole = StepDocuments(_documents(), [np.arange(len(lengths)) % RANKS for lengths in LENGTHS])
    step = make_step(whole, _options(1), Taker(0, 0, "cpu"), room=70)
    assert [len(each) for each in step.documents.micro_batches] == [len(each) for each in LENGTHS]


@pytest.mark.parametrize("stages", [1, 2])
def test_rows_lie_in_the_sequence_shards_of_their_layouts(stages: int) -> None:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    step = make_step(StepDocuments(_documents()), _options(stages, align=4), Taker(0, 0, "cpu"))
    for documents, layouts, batch in zip(_documents(), step.plan.layouts, step.batches, strict=True):
        rows = rank_batch(documents, layouts, 0, align=4, chunks=4)
        assert batch.tokens[0].tolist() == rows.tokens.tolist()
        assert batch.loss_mask[0].tolist() == rows.loss_mask.tolist()


def test_a_document_may_be_anything_with_a_length_and_slices() -> None:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    asked: list[slice] = []

    class Lazy:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, tokens: slice) -> list[int]:
            asked.append(tokens)
            return list(range(100))[tokens]

    step = make_step(StepDocuments([[Lazy(), list(range(7))]]), _options(1), Taker(0, 1, "cpu"))
    mine = step.plan.layouts[0][0].q.on_rank(1)
    assert step.batches[0].tokens.shape == (1, sum(int(layout.q_rows[1]) for layout in step.plan.layouts[0]))
    assert len(mine) and all(each.stop - each.start < 100 for each in asked), "only a rank's own rows are read"


def _rows(number: int) -> RankBatch:
    numbers = np.arange(1, number + 1)
    return RankBatch(
        numbers, numbers, np.ones(number, bool), numbers, np.full(number, number), numbers, (number,), numbers
    )


def test_padding_to_equal_rows_adds_no_loss() -> None:
    from megatron_patches.steps.device_batch import with_equal_rows

    short, long = with_equal_rows([_rows(3), _rows(5)])
    assert short.tokens.tolist() == [1, 2, 3, 0, 0] and short.loss_mask.tolist() == [True] * 3 + [False] * 2
    assert short.labels.tolist() == short.positions.tolist() == [1, 2, 3, 0, 0]
    assert short.nano_rows == long.nano_rows == (5,)
    assert np.array_equal(long.tokens, _rows(5).tokens)


@pytest.mark.parametrize("disaggregate", [True, False])
def test_lengths_of_documents_are_there_where_positions_need_them(disaggregate: bool) -> None:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    documents = StepDocuments([[list(range(5)), list(range(3))]], None if disaggregate else [np.array([0, 1])])
    for lengths in (False, True):
        step = make_step(documents, _options(1, disaggregate), Taker(0, 0, "cpu", lengths=lengths))
        found = step.batches[0].attention.document_lengths
        assert (found is not None) == lengths
        if found is not None:
            assert found.shape == step.batches[0].tokens[0].shape and set(found.tolist()) <= {0, 3, 5}
