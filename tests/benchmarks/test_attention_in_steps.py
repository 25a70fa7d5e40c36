"""Figures of attention in kept training steps are those of the kept runs and tables."""

import numpy as np
import pytest

from benchmarks.attention_in_steps import FILES, compared, seconds_of, tables_of, tasks_of
from benchmarks.calibration_runs import runs_of
from benchmarks.tables import kept

FILE = "throughput_2_gpus_peers_64k"


def test_the_table_that_planned_a_run_says_what_the_run_kept_as_planned() -> None:
    report = kept(FILE)
    run = next(run for run in runs_of(f"{FILE}.json", report) if run.mode.name == "distca")
    planned = report["cells"][run.workload]["modes"]["distca"]["attention_by_rank"]["planned_s_per_layer"]
    tasks = tasks_of(run, run.batches[0])
    said = sum(seconds_of(run, tasks[way], way, tables_of(run)["shipped"]) for way in ("forward", "backward"))
    assert said / run.job.model.layers == pytest.approx([rank[0] for rank in planned], rel=0.01)


def test_kept_figures_are_made_anew() -> None:
    """Those of DistCA within what another plan may differ by, the others to the last digits."""
    found = kept("attention_in_steps")
    assert list(dict.fromkeys(each["file"] for each in found["steps"])) == list(FILES)
    steps, traced = compared(FILE)
    for anew, each in ((steps, "steps"), (traced, "traced")):
        before = [one for one in found[each] if one["file"] == FILE]
        assert [one["mode"] for one in anew] == [one["mode"] for one in before]
        for one, other in zip(anew, before, strict=True):
            near = 0.01 if one["mode"] == "distca" else 1e-6
            names = ("shipped", "again") if each == "steps" else ("forward", "backward")
            for name in names:
                here, there = (_numbers(which[name]) for which in (one, other))
                assert here == pytest.approx(there, rel=near)


def _numbers(values: list[list[float]] | dict[str, float]) -> list[float]:
    return list(values.values()) if isinstance(values, dict) else np.ravel(values).tolist()
