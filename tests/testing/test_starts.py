"""Cases of GPU tests in one start of ranks, here of CPU ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from distca.testing.ranks import RankFailure
from tests.gpu.starts import Starts


def _process(word: str) -> tuple[str, int]:
    return word, os.getpid()


def _late_on_rank_0(word: str) -> tuple[str, int]:
    time.sleep(2.5 * (dist.get_rank() == 0))  # rank 1 fails in the next case meanwhile, if it does not wait
    return _process(word)


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.barrier()


CASES = {
    "first": (_late_on_rank_0, "a"),
    "wrong": (_fail_on_rank_1,),
    "third": (_process, "b"),
    "fourth": (_process, "c"),
}


def test_a_case_that_fails_hides_no_other_and_those_before_and_behind_it_share_starts(tmp_path: Path) -> None:
    starts = Starts(tmp_path, CASES, gpus=False)
    with pytest.raises(RankFailure, match="ValueError: no"):
        starts.result("all", "wrong", 2, CASES)
    first, third, fourth = (starts.result("all", name, 2, CASES) for name in ("first", "third", "fourth"))
    assert [[word for word, _ in each] for each in (first, third, fourth)] == [["a"] * 2, ["b"] * 2, ["c"] * 2]
    before, behind, still = ([process for _, process in each] for each in (first, third, fourth))
    assert behind == still and not {*before} & {*behind} and len({*before, *behind}) == 4


def test_only_selected_cases_run(tmp_path: Path) -> None:
    starts = Starts(tmp_path, ["third"], gpus=False)
    assert [word for word, _ in starts.result("all", "third", 1, CASES)] == ["b"]
    assert [file.name for file in tmp_path.glob("*/*")] == ["third of rank 0"]
