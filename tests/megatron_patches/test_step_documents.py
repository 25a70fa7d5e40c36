"""What a caller gives as the documents of a step: lists of any kind, or a sentence, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distca.data.batch import targets_of
from distca.errors import DataError, PlanError
from megatron_patches.step_documents import StepDocuments, listed

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


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, "A step is a list of micro-batches, and each a list of documents"),
    "one document": (IDS, "A step is a list of micro-batches"),
    "documents": ([IDS, IDS], "Micro-batch 0 has numbers in place of documents; give each as a list of them."),
    "a row too many": ([[IDS], [IDS[None]]], "Micro-batch 1 has a document that is no row of token ids"),
    "text": ([["text"]], "Micro-batch 0 has a document that is no row of token ids"),
    "an object": ([[{"input_ids": [1, 2]}]], "Micro-batch 0 has a document that is no row of token ids"),
    "homes of one": (_step([IDS], [IDS], homes=[[0]]), "`homes` are those of 1 micro-batches, and the step has 2."),
    "flat homes": (_step([IDS], homes=np.zeros(1, int)), "`homes` of micro-batch 0 are not one number for each of "),
    "few homes": (_step([IDS, IDS], homes=[[0]]), "`homes` of micro-batch 0 are not one number for each of "),
    "few weights": (_step([IDS, IDS], weights=[[1.0]]), "`weights` of micro-batch 0 are not one number for each of "),
    "many weights": (_step([IDS], weights=[[1.0, 1.0]]), "`weights` of micro-batch 0 are not one number for each of "),
    "weights of tokens": (
        _step([IDS, IDS[1:]], weights=[[np.ones(5), np.ones(4)]]),
        "`weights` of micro-batch 0 are not one number for each of ",
    ),
    "below 0": (_step([IDS], weights=[[-1.0]]), "A weight of micro-batch 0 is -1; weights are finite and at least 0."),
    "no number": (
        _step([IDS], weights=[[np.nan]]),
        "A weight of micro-batch 0 is nan; weights are finite and at least 0.",
    ),
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
    with pytest.raises(DataError, match=r"`learned` gives an array of shape .* for tokens 1 to 3; it is to give one"):
        targets_of(_Learns(lambda _: learned), slice(1, 3))
