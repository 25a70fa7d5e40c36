"""A throughput run that ends in the middle of a mode: what it leaves, and that everything which reads it copes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distca.train.config.schema import RunConfig
from tests.testing.programs import torchrun

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEPT = 2  # batches after which what was measured is kept, in place of ten
BATCHES, MEASURED = 4, 3  # of the first mode, and of the second when it is ended
MODEL = ["--model.layers", "1", "--model.hidden", "32", "--model.ffn", "48", "--model.heads", "2"]
MODEL += ["--model.kv_heads", "2", "--model.vocabulary", "64", "--data.tokens_per_rank", "128"]
MODEL += ["--data.context_length", "128"]
# Ends as a time limit ends it: at once, in the middle of a mode.
ENDED = f"""
import os
from benchmarks.throughput import measure
from benchmarks.throughput.__main__ import main

step = measure._Run._step


def step_or_end(self, ahead, record):
    if self._trainer.config.cad.enabled and len(record.loss) == {MEASURED}:
        os._exit(1)
    step(self, ahead, record)


measure._Run._step, measure._KEPT_EVERY = step_or_end, {KEPT}
main()
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run that was ended while DistCA was measured, after packed documents."""
    if torch.cuda.is_available():
        pytest.skip("the CPU rehearsal")
    folder = tmp_path_factory.mktemp("ended")
    (folder / "ended.py").write_text(ENDED)
    words = ["ended.py", "--output", "out", "--modes", "packed", "distca", "--mixes", "prolong", "--contexts", "128"]
    result = torchrun(2, *words, "--batches", str(BATCHES), "--warm-up", "1", "--", *MODEL, cwd=folder)
    assert result.returncode == 1 and "distca on prolong 128" not in result.stderr, result.stderr
    assert "packed on prolong 128" in result.stderr, result.stderr
    return folder / "out"


def test_what_the_ended_mode_measured_is_kept(ended):
    cell = json.loads((ended / "benchmark.json").read_text())["cells"]["prolong 128"]
    packed, ours = cell["modes"]["packed"], cell["modes"]["distca"]
    assert (packed["batches"], ours["batches"]) == (BATCHES, KEPT)
    for made in (packed, ours):
        assert len(made["steps_s"]) == len(made["losses"]) == len(made["tokens"]) == made["batches"]
        assert [len(rank) for rank in made["attention_by_rank"]["measured_s"]] == 2 * [made["batches"]]
        assert made["tokens_per_s"] == pytest.approx(sum(made["tokens"]) / sum(made["steps_s"]))
    assert ours["tokens"] == packed["tokens"][:KEPT]
    assert max(cell["compared"]["loss_difference"].values()) < 1e-5 and cell["compared"]["apart"] == []


def test_an_ended_mode_is_compared_over_the_batches_it_has(ended):
    cell = json.loads((ended / "benchmark.json").read_text())["cells"]["prolong 128"]
    packed, ours = cell["modes"]["packed"], cell["modes"]["distca"]
    ratio = sum(packed["steps_s"][:KEPT]) / sum(ours["steps_s"])
    assert cell["compared"]["batches"] == KEPT
    assert cell["compared"]["over_packed"] == pytest.approx(ratio)
    assert cell["compared"]["over_ideal_baseline"] == pytest.approx(ratio)
    table = (ended / "table.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith("| distca")]
    assert row.startswith(f"| distca, {KEPT} of {BATCHES} batches |") and f"| {ratio:.3f} |" in row
    assert "| packed |" in table
    assert f"DistCA over the best baseline (packed) in the first {KEPT} batches: {ratio:.3f} ×." in table


def test_a_sweep_over_an_ended_run_says_so(ended, tmp_path, monkeypatch):
    from benchmarks.throughput import sweep

    monkeypatch.setattr(sys, "argv", ["sweep", str(ended), "--output", str(tmp_path)])
    sweep.main()
    assert f"distca, {KEPT} of {BATCHES} batches" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    cell = json.loads((ended / "benchmark.json").read_text())["cells"]["prolong 128"]
    assert sweep._label("prolong 128", cell["modes"], BATCHES) == f"prolong 128\ndistca: {KEPT} of {BATCHES} batches"
    assert sweep._label("prolong 128", cell["modes"], KEPT) == "prolong 128"


@pytest.mark.parametrize("broken", ['{"hardware": ', "[]", "{}"])
def test_a_sweep_leaves_a_broken_file_out(broken, tmp_path, capsys):
    from benchmarks.throughput import sweep

    whole, file = tmp_path / "whole.json", tmp_path / "broken.json"
    whole.write_text('{"cells": {}}')
    file.write_text(broken)
    assert [sweep._read(whole), sweep._read(file)] == [{"cells": {}}, None]
    assert f"warning: {file} is no report of the benchmark and is left out" in capsys.readouterr().err


def test_what_only_a_modes_end_knows_may_be_missing(ended, tmp_path):
    from benchmarks.throughput.sweep import plot
    from benchmarks.throughput.table import table

    report = json.loads((ended / "benchmark.json").read_text())
    modes = report["cells"]["prolong 128"]["modes"]
    # As on GPUs: the complete mode was traced and its memory is known.
    modes["packed"] |= {"memory_gib": {"max": 2.0, "min": 1.0}, "mfu": 0.5}
    modes["distca"] |= {"idle_share": None, "idle_shares": None, "gpus": []}
    rows = [line for line in table(report).splitlines() if line.startswith("| ")]
    head, _, *cells = ([text.strip() for text in row.strip("|").split("|")] for row in rows)
    packed, ours = (dict(zip(head, row, strict=True)) for row in cells)
    assert packed["idle"] and packed["peak GiB max (min)"] == "2.0 (1.0)"
    assert not ours["idle"] and not ours["peak GiB max (min)"]
    plot([report], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def made(steps, loss=2.0):
    count = len(steps)
    figures = {"batches": count, "steps_s": steps, "tokens": [6] * count, "tokens_per_s": 6 * count / sum(steps)}
    return figures | {"losses": [2.0] * (count - 1) + [loss], "gradient_norms": [1.0] * count}


def test_modes_with_fewer_batches_than_ours_are_no_baselines():
    from benchmarks.throughput.report import compare

    modes = {"distca": made([1.0, 1.0, 2.0]), "packed": made([2.0, 2.0, 4.0])}
    complete, ended = compare(modes), compare(modes | {"cp2": made([0.5, 0.5]), "variable": made([0.1])})
    assert complete["batches"] == ended["batches"] == 3
    assert complete["ideal_baseline"] == ended["ideal_baseline"] == "packed"
    assert complete["over_packed"] == ended["over_packed"] == 2.0
    assert "over_variable" not in ended
    assert "batches" not in compare({"packed": made([1.0]), "cp2": made([1.0])})


def test_losses_are_compared_as_far_as_both_modes_have_them():
    from benchmarks.throughput.report import compare

    first = made([1.0] * 4, loss=9.0)  # the last batch's, which only a complete mode can be apart in
    compared = compare({"packed": first, "cp2": made([1.0] * 4), "distca": made([1.0] * 3)})
    assert compared["apart"] == ["cp2"] and compared["loss_difference"]["distca"] == 0.0
    assert compare({"packed": first, "distca": made([1.0] * 3, loss=2.1)})["apart"] == ["distca"]
    assert compare({"packed": made([1.0] * 3), "distca": first})["apart"] == []


@pytest.mark.parametrize("batches,kept", [(9, []), (10, []), (11, [10]), (30, [10, 20])])
def test_records_are_kept_between_steps_and_never_for_the_last(batches, kept):
    from benchmarks.throughput.measure import _Run

    events = []
    run = object.__new__(_Run)  # its order needs no ranks
    run.on_gpu = run._watches = False
    run._trainer = SimpleNamespace(
        cad=SimpleNamespace(pool=SimpleNamespace(transport=SimpleNamespace(fallback_exchanges=3))),
        config=RunConfig(),
    )
    run.garbage = SimpleNamespace(collect=lambda: events.append("collected"))

    def step(inputs, record):
        events.append("step")
        record.loss.append(1.0)

    run._step = step
    record = run.measured(None, 2, batches, lambda record: events.append((len(record.loss), record.fallback_exchanges)))
    assert len(record.loss) == batches and record.fallback_exchanges == 3
    expected = []
    for done in range(batches + 1):
        expected += ["step"] if done else ["step"] * 2  # warm-up
        expected += [(done, 3), "collected"] if done in kept else []
    assert events == expected


def test_a_report_that_cannot_be_written_whole_leaves_the_one_before(tmp_path, monkeypatch):
    from benchmarks.throughput.report import write

    report = {"hardware": "x", "command": "y", "links": {}, "link_channels": None, "cells": {}}
    write(tmp_path, report)
    before = (tmp_path / "benchmark.json").read_text()
    write_text = Path.write_text

    def ended(path, text, **how):
        write_text(path, text[: len(text) // 2], **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", ended)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, report | {"hardware": "z"})
    assert (tmp_path / "benchmark.json").read_text() == before
    assert list(tmp_path.rglob("benchmark.json")) == [tmp_path / "benchmark.json"]
