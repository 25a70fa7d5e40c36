"""A sample of changes of meaning; the whole is benchmarks/results/meaning_fuzz.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.train.small_runs import ROOT

if find_spec("transformers") is None or find_spec("jinja2") is None:  # to import them takes half a second
    pytest.skip("transformers or jinja2 is not installed.", allow_module_level=True)

from distca.data.chat import ChatEncoder
from tests.faults.meaning import attempt
from tests.faults.meaning.chats import Case, changed_case, judge


def test_a_sample_of_changes_is_served_as_by_transformers_or_refused() -> None:
    found = attempt(40, 7)
    assert [each.kept() for each in found if each.is_defect] == []
    assert {each.ended for each in found} >= {"served", "refused"}


def test_the_kept_result_has_no_defect() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "meaning_fuzz.json").read_text())
    counted = {kind: sum(each.values()) for kind, each in kept["kinds"].items()}
    assert (kept["cases"], kept["defects"]) == (2000, [])
    assert counted == {"configurations": 800, "templates": 600, "conversations": 600}


@pytest.fixture
def served() -> Case:
    """A conversation of several turns that is served."""
    cases = (changed_case(number, 1, "conversations") for number in range(3, 500, 25))  # ChatML
    return next(case for case in cases if len(case.conversation.messages) > 3 and judge(case) == ("served", ""))


Wrong = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ids, mask: (ids, ~mask),
        lambda ids, mask: (ids, np.ones_like(mask)),
        lambda ids, mask: (ids, np.zeros_like(mask)),
        lambda ids, mask: (ids, mask & np.roll(mask, -1)),
        lambda ids, mask: (ids, mask & np.roll(mask, 1)),
        lambda ids, mask: (ids, mask | np.roll(mask, -1)),
        lambda ids, mask: (ids[:-1], mask[:-1]),
    ],
    ids=["others", "all", "none", "no stop", "first left out", "one before", "last token cut"],
)
def test_the_judge_finds_what_is_wrong(served: Case, wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ChatEncoder.conversation

    def conversation(self: ChatEncoder, *arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        ids, mask = right(self, *arguments)
        assert mask is not None
        return wrong(ids, mask)

    monkeypatch.setattr(ChatEncoder, "conversation", conversation)
    assert judge(replace(served))[0] == "different"
