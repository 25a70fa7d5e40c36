"""A rank that fails ends all others within seconds, and every one says who failed, where and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from distca.cluster import health
from distca.testing.ranks import run_ranks
from distca.train.run.run_folder import RunFolder
from tests.train.faults import Ended, run_with_fault
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

pytestmark = pytest.mark.slow

ENDED = {
    "exception": ("Rank 1 failed in step 3 on ", "RuntimeError: the fault of the test", 'faults.py", line'),
    "transport": ("An exchange does not fit its memory; raise it.",),
    "exit": ("Rank 1 failed in step 3 on ", "SystemExit: 3"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ended]]]:
    """A run with each fault, all at the same time, as ranks that end wait for each other's words."""
    folder = tmp_path_factory.mktemp("faults")
    write_texts(folder / "texts")
    line = arguments(data__path=folder / "texts", train__steps=1000)
    with ThreadPoolExecutor(len(ENDED)) as threads:
        yield {
            fault: threads.submit(run_with_fault, folder, fault, *line, "--output", str(folder / fault))
            for fault in ENDED
        }


@pytest.mark.parametrize("fault", ENDED)
def test_a_fault_of_one_rank_ends_all_with_its_words(runs: dict[str, Future[Ended]], fault: str) -> None:
    ended = runs[fault].result()
    assert ended.code != 0
    assert 0 < ended.seconds < health._LOST_S, "others would end by themselves once they count the rank as lost"
    first, *others = ENDED[fault]
    for said in ended.said:
        assert said.count(first) == 1, said
        assert all(words in said for words in others), said


def test_a_run_that_is_told_to_end_saves_and_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    """By a signal to one rank only, while a checkpoint is written; then by its time; then there is nothing to do."""
    write_texts(tmp_path / "texts")
    line = arguments(name="told", output=tmp_path, data__path=tmp_path / "texts", checkpoint__resume="auto")
    line = [*line, "--train.steps", "7"]
    whole = arguments(name="whole", output=tmp_path, data__path=tmp_path / "texts", train__steps=7)
    run_ranks(2, train_all, [whole])
    told = run_with_fault(tmp_path, "told", *line, "--checkpoint.save_every", "1", "--log.timeline_steps", "[2,7]")
    assert told.code == 0, told.said
    assert "Ended by SIGTERM after step" in told.said[0] and "of 7; RESUME=auto" in told.said[0]
    assert "Ended by" not in told.said[1], "once for all ranks"
    _, saved = RunFolder(tmp_path / "told").checkpoints()
    assert saved.step == 4, "the step during which it came, and the one in which ranks told each other"
    run_ranks(2, train_all, [[*line, "--train.time_limit", "1e-6"], line, line], timeout=100)
    assert [each.step for each in RunFolder(tmp_path / "told").checkpoints()] == [saved.step + 1, 7]
    assert not (tmp_path / "told-2").exists()
    recorded = json.loads((tmp_path / "told" / "timeline.json").read_text())["traceEvents"]
    steps = {event["name"] for event in recorded if event["name"].startswith("step ")}
    assert steps == {"step 2", "step 3", "step 4"}, "what it has of them"
    for key in ("loss", "grad_norm", "lr"):
        assert steps_of(tmp_path / "told", key) == steps_of(tmp_path / "whole", key)
