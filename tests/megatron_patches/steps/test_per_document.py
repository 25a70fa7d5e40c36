"""Figures of documents in the order of a rank's rows; test_api.py has them on several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distca.errors import PlanError
from megatron_patches.steps.per_document import gather_documents, rows_of

BATCH: Any = SimpleNamespace(
    tokens=torch.zeros(1, 4, dtype=torch.int64),
    documents=torch.tensor([[1, 0, 0, -1]]),
    positions=torch.tensor([[0, 0, 1, 0]]),
    micro_batch_lengths=np.array([2, 1]),
)


@pytest.mark.parametrize(
    "documents",
    [
        [[1.0, 2.0], [3.0]],
        [np.array([2.0, 1.0])[::-1], np.array([3.0])],
        (torch.tensor(each) for each in ([1.0, 2.0], [3.0])),
    ],
)
def test_figures_may_be_lists_reversed_arrays_or_come_one_by_one(documents: Any) -> None:
    assert rows_of(BATCH, documents).tolist() == [[3, 1, 2, 0]]


@pytest.mark.parametrize("documents", [None, 3, torch.tensor(3.0), [1.0, 2.0], [[1.0, 2.0], "text"]])
def test_what_is_no_list_of_figures_is_a_sentence(documents: Any) -> None:
    with pytest.raises(PlanError, match="rows_of takes a list with one list of figures for each document"):
        rows_of(BATCH, documents)


def test_figures_for_some_micro_batches_only_are_refused() -> None:
    step: Any = SimpleNamespace(batches=[BATCH, BATCH])
    assert gather_documents(step, []) == []
    with pytest.raises(PlanError, match="given for 1 micro-batches, and the step has 2"):
        gather_documents(step, [torch.zeros(1, 4)])
