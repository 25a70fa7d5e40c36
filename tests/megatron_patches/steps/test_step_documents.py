"""What a caller gives as the documents of a step: lists of any kind, or a sentence, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distca.data.batch import targets_of
from distca.errors import DataError, PlanError
from megatron_patches.steps.step_documents import StepDocuments, check_room, checksum, listed

IDS = np.arange(5)


def _step(*micro_batches: Any, homes: Any = None, weights: Any = None) -> StepDocuments:
    return StepDocuments(micro_batches, homes, "note", weights)


def test_iterators_are_read_once_for_all() -> None:
    given: Any = ((IDS[:length] for length in (2, 3)) for _ in range(2))
    found = listed(given)
    for _ in range(2):
        assert [[len(document) for document in documents] for documents in found.micro_batches] == [[2, 3], [2, 3]]


def test_homes_and_weights_may_be_lists_and_none() -> None:
    found = listed(_step([IDS, IDS], [IDS], homes=[None, [1]], weights=[[0, 2.5], [1]]))
    assert found.note == "note" and found.homes is not None and found.homes[0] is None
    assert [each.tolist() for each in found.weights or ()] == [[0, 2.5], [1]]
    assert listed([[], []]).micro_batches == [[], []]
    some = listed(_step([IDS, IDS], [], homes=[[0, 1], []], weights=[None, []])).weights
    assert [each.tolist() for each in some or ()] == [[1, 1], []]


def test_homes_of_more_than_a_rank_holds_are_refused() -> None:
    check_room(listed(_step([IDS, IDS], [IDS], homes=[[0, 1], [1]])), 2, 5)
    with pytest.raises(PlanError, match="Homes of micro-batch 1 put 10 tokens on data-parallel rank 1, and tokens_per"):
        check_room(listed(_step([IDS], [IDS, IDS, IDS[:1]], homes=[None, [1, 1, 0]])), 2, 9)


def test_a_document_without_tokens_is_named() -> None:
    with pytest.raises(
        PlanError, match=r"^Document 1 of micro-batch 2 has 0 tokens; it needs at least 1: leave it out"
    ):
        check_room(listed([[IDS], [], [IDS, []]]), 2, 5)


def test_other_ids_and_other_weights_are_told_from_lengths() -> None:
    def of(first: int, weights: Any = None, dtype: Any = np.int64) -> int:
        documents = [(first + np.arange(length)).astype(dtype) for length in (1, 40, 0, 3)]
        return checksum(listed(_step(documents, weights=weights)))

    assert of(0) == of(0, dtype=np.uint16) == checksum(listed([[[0], list(range(40)), [], [0, 1, 2]]]))
    assert len({of(0), of(1), of(0, [[1, 1, 1, 2]]), of(0, [[1, 1, 1, 3]])}) == 4
    assert checksum(listed([[], [[]]])) == 0


class _Guarded:
    """Says what it was asked for; nothing behind its end may be."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, tokens: slice) -> np.ndarray:
        assert 0 <= tokens.start <= tokens.stop <= self.length
        self.asked.append(tokens.stop - tokens.start)
        return np.arange(tokens.start, tokens.stop)


def test_few_ids_of_few_documents_are_compared() -> None:
    documents = [_Guarded(length) for length in (1, 5, 17, 100_000, *range(200))]
    checksum(listed([documents[:50], documents[50:]]))
    asked = [each.asked for each in documents if each.asked]
    assert len(asked) == 8 and max(map(max, asked)) == 16
    few = [_Guarded(5), _Guarded(1)]
    checksum(listed([few]))
    assert max(few[0].asked) == 5 and max(few[1].asked) == 1


def test_weights_may_say_which_documents_count() -> None:
    assert [each.tolist() for each in listed(_step([IDS, IDS], weights=[[True, False]])).weights or ()] == [[1, 0]]


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, "A step is a list of micro-batches, and each a list of documents"),
    "one document": (IDS, "A step is a list of micro-batches"),
    "documents": ([IDS, IDS], "Document 0 of micro-batch 0 is a int64; a step is a list of micro-batches"),
    "a row too many": ([[IDS], [IDS[None]]], "Document 0 of micro-batch 1 is an array of 2 dimensions; "),
    "text": ([["text"]], "Document 0 of micro-batch 0 is a str; "),
    "an object": ([[{"input_ids": [1, 2]}]], "Document 0 of micro-batch 0 is a dict; "),
    "nothing beside a document": ([[IDS, None]], "Document 1 of micro-batch 0 is a NoneType; "),
    "homes of one": (_step([IDS], [IDS], homes=[[0]]), "`homes` are for 1 micro-batches, and the step has 2."),
    "flat homes": (_step([IDS], homes=np.zeros(1, int)), "`homes` of micro-batch 0 are not one rank for each of "),
    "few homes": (_step([IDS, IDS], homes=[[0]]), "`homes` of micro-batch 0 are not one rank for each of "),
    "homes between ranks": (
        _step([IDS], homes=[[0.5]]),
        "`homes` of micro-batch 0 are not one rank for",
    ),
    "few weights": (_step([IDS, IDS], weights=[[1.0]]), "`weights` of micro-batch 0 are not one number for each of "),
    "many weights": (_step([IDS], weights=[[1.0, 1.0]]), "`weights` of micro-batch 0 are not one number for each of "),
    "weights of tokens": (
        _step([IDS, IDS[1:]], weights=[[np.ones(5), np.ones(4)]]),
        "`weights` of micro-batch 0 are not one number for each of ",
    ),
    "below 0": (_step([IDS], weights=[[-1.0]]), "A weight of micro-batch 0 is -1; float32 weights from 0 on are allow"),
    "no number": (_step([IDS], weights=[[np.nan]]), "A weight of micro-batch 0 is nan; float32 weights"),
    "infinite in float32": (_step([IDS], weights=[[1e39]]), "A weight of micro-batch 0 is 1e+39; float32 weights"),
    "weights with a gradient": (
        _step([IDS], weights=[torch.ones(1, requires_grad=True)]),
        "`weights` of micro-batch 0 cannot be read as an array: Can't call numpy() on Tensor that requires grad",
    ),
    "a set": ([[{1, 2}]], "Document 0 of micro-batch 0 is a set; "),
    "a number as homes": (_step([IDS], homes=0), "`homes` of micro-batch 0 are not one rank for each of "),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_step_is_a_sentence(case: str) -> None:
    given, said = WRONG[case]
    with pytest.raises(PlanError) as refused:
        listed(given)
    assert str(refused.value).startswith(said)


class _Learns:
    def __init__(self, learned: Callable[[slice], Any]) -> None:
        self.learned = learned

    def __len__(self) -> int:
        return 5

    def __getitem__(self, tokens: slice) -> np.ndarray:
        return IDS[tokens]


@pytest.mark.parametrize("learned", [True, [True], np.ones(5, bool)])
def test_a_document_says_of_each_token_whether_it_is_learned(learned: Any) -> None:
    assert targets_of(_Learns(lambda _: [1, 0]), slice(1, 3)).tolist() == [1, 0]
    with pytest.raises(DataError, match=r"`learned` gives 0\.5 for one of tokens 1 to 3; it says whether each is lear"):
        targets_of(_Learns(lambda _: [0.5, 1]), slice(1, 3))
    with pytest.raises(DataError, match=r"`learned` gives an array of shape .* for tokens 1 to 3; it is to give one"):
        targets_of(_Learns(lambda _: learned), slice(1, 3))


def test_learned_is_a_function() -> None:
    document = _Learns(lambda _: None)
    document.learned = np.ones(5, bool)  # type: ignore[assignment]
    with pytest.raises(DataError, match="`learned` is a ndarray; it is to be a function"):
        targets_of(document, slice(1, 3))
