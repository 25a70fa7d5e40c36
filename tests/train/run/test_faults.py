"""A rank that fails ends all others within seconds, and every one says who failed, where and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.faults import run_with_fault
from tests.train.small_runs import arguments, write_texts

pytestmark = pytest.mark.slow

ENDED = {
    "exception": ("Rank 1 failed in step 3 on ", "RuntimeError: the fault of the test", 'faults.py", line'),
    "transport": ("An exchange does not fit its memory; raise it.",),
    "exit": ("Rank 1 failed in step 3 on ", "SystemExit: 3"),
}


@pytest.mark.parametrize("fault", ENDED)
def test_a_fault_of_one_rank_ends_all_with_its_words(tmp_path: Path, fault: str) -> None:
    write_texts(tmp_path / "texts")
    line = arguments(output=tmp_path, data__path=tmp_path / "texts", train__steps=1000)
    ended = run_with_fault(tmp_path, fault, *line)
    assert ended.code != 0
    assert 0 < ended.seconds < 12, "ten seconds, and those in which torchrun collects its ranks"
    first, *others = ENDED[fault]
    for said in ended.said:
        assert said.count(first) == 1, said
        assert all(words in said for words in others), said
