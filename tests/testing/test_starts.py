"""Cases of GPU tests in worlds of ranks, here of CPU ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from distca.testing.ranks import RankFailure
from tests.gpu import worlds as rooms
from tests.gpu.outcomes import TIME_IS_OVER
from tests.gpu.starts import Case, Starts
from tests.gpu.worlds import Worlds


def _process(word: str) -> tuple[str, int]:
    return word, os.getpid()


def _late_on_rank_0(word: str) -> tuple[str, int]:
    time.sleep(1.5 * (dist.get_rank() == 0))  # rank 1 fails in the next case meanwhile, if it does not wait
    return _process(word)


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.barrier()


def _written(path: Path) -> bool:
    return path.exists()


def _write(path: Path) -> None:
    path.touch()


def _for_ever() -> None:
    time.sleep(600)


CASES = {
    "first": Case(2, _late_on_rank_0, ("a",)),
    "wrong": Case(2, _fail_on_rank_1),
    "third": Case(2, _process, ("b",)),
    "fourth: one": Case(2, _process, ("c",)),
}


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    (tmp_path / "spool").mkdir()
    return tmp_path / "spool"


@pytest.fixture
def worlds(spool: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worlds]:
    monkeypatch.setattr(rooms, "RANKS_ON_CPUS", 2)
    with Worlds(spool, 0, record=spool / "cases.jsonl") as made:
        yield made


def test_cases_of_all_files_share_ranks_until_one_fails_which_hides_no_other(worlds: Worlds, spool: Path) -> None:
    one = Starts(spool, spool, "one", CASES, ["first", "wrong"])
    two = Starts(spool, spool, "two", CASES, ["third", "fourth", "not there"])
    with pytest.raises(RankFailure, match="ValueError: no"):
        one.result("wrong")
    found = {name: made.result(name) for made, name in ((one, "first"), (two, "third"), (two, "fourth: one"))}
    assert [[word for word, _ in each] for each in found.values()] == [["a"] * 2, ["b"] * 2, ["c"] * 2]
    before, behind, still = ([process for _, process in each] for each in found.values())
    assert behind == still and not {*before} & {*behind} and len({*before, *behind}) == 4
    lines = [json.loads(line) for line in (spool / "cases.jsonl").read_text().splitlines()]
    assert [(line["case"], line["is"]) for line in lines] == [
        ("one: first", "done"),
        ("one: wrong", "failed"),
        ("two: third", "done"),
        ("two: fourth: one", "done"),
    ]
    assert lines[0]["seconds"] > 1.5 and not worlds.failures


def test_a_case_comes_behind_those_that_it_needs_in_other_processes_where_it_asks_for_them(
    worlds: Worlds, spool: Path
) -> None:
    cases = {
        "reads": Case(1, _written, (spool / "file",), world="others", needs=("writes", "who writes")),
        "who reads": Case(1, _process, ("",), world="others"),
        "who writes": Case(1, _process, ("",)),
        "writes": Case(1, _write, (spool / "file",)),
    }
    starts = Starts(spool, spool, "one", cases, ["reads", "who reads"])
    assert starts.result("reads") == [True]
    assert starts.result("who reads") != starts.result("who writes")


def test_time_that_is_over_leaves_what_is_done(spool: Path) -> None:
    cases = {
        "first": Case(1, _process, ("a",)),
        "long": Case(1, _for_ever),
        "never": Case(1, _process, ("c",), needs=("long",)),
    }
    starts = Starts(spool, spool, "one", cases, cases)
    with Worlds(spool, 0, time.monotonic() + 3):
        for name in ("long", "never"):
            with pytest.raises(pytest.skip.Exception, match=TIME_IS_OVER):
                starts.result(name)
        assert starts.result("first")[0][0] == "a"
    late = Starts(spool, spool, "late", cases, ["first"])
    with Worlds(spool, 0) as worlds:
        worlds.stop()
        with pytest.raises(pytest.skip.Exception, match=TIME_IS_OVER):
            late.result("first")


def test_a_case_that_takes_too_long_fails(worlds: Worlds, spool: Path) -> None:
    starts = Starts(spool, spool, "one", {"long": Case(1, _for_ever, limit_s=0.5)}, ["long"])
    with pytest.raises(RankFailure, match=r"Ranks \[0\] gave no answer within 0 s"):
        starts.result("long")
