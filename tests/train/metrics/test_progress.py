import io
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from distca.train.metrics.progress import RunSummary, StepProgress, perplexity, print_summary
from distca.train.run.run_folder import RunFolder

VALUES = {"loss": 2.5, "tokens_per_s": 12345.6, "imbalance_before": 2.1, "imbalance_after": 1.02, "mfu": None}


def test_lines_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="distca")
    with StepProgress(7, every=3, console=Console(file=io.StringIO())) as progress:
        for step in range(1, 8):
            progress.update(step, VALUES)
    words, *lines = caplog.messages
    assert "Imbalance is the time of attention on the busiest rank over the mean in this step: with" in words
    assert [message.split("  ")[0] for message in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert lines[0] == (
        "step 3/7  loss 2.5000  of this step 2.5000  perplexity 12.18  tokens/s 12,346  imbalance 2.10 → 1.02"
    )


def test_a_line_has_the_mean_loss_of_the_last_steps_and_the_time_to_go(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="distca")
    with StepProgress(24, every=12, console=Console(file=io.StringIO())) as progress:
        for step in range(1, 25):
            figures = {"grad_norm": 0.25, "tokens_seen": 1000.0 * step, "peak_memory_gb": 3.0}
            progress.update(step, {"loss": float(step), "step_s": 600.0 + step % 2, **figures})
    assert caplog.messages[1] == (
        "step 12/24  loss 7.5000  of this step 12.0000  perplexity 1,808  gradient 0.25  tokens 12,000  GiB 3.0  "
        "ETA 2:00:06"
    )
    assert "ETA" not in caplog.messages[-1]
    assert perplexity(1e9) == float("inf")


def test_bar_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="distca")
    screen = io.StringIO()
    with StepProgress(9, done=4, console=Console(file=screen, force_terminal=True, width=120)) as progress:
        progress.update(5, VALUES)
        progress.update(6, VALUES | {"mfu": 0.5, "loss": 3.0})
    assert "6/9" in screen.getvalue()
    assert "loss 2.7500" in screen.getvalue()
    assert "tokens/s 12,346  MFU 50.0%  imbalance 2.10 → 1.02" in screen.getvalue()
    assert len(caplog.messages) == 1, "the words alone"


def test_the_bar_says_that_a_validation_runs() -> None:
    screen = io.StringIO()
    with StepProgress(9, console=Console(file=screen, force_terminal=True, width=120, color_system=None)) as progress:
        progress.update(6, VALUES)
        progress.validating(7)
    last = screen.getvalue().split("\x1b[2K")[-1]
    assert last.startswith("step 7/9 ") and "validating" in last and "loss" not in last


def test_a_narrow_terminal_shows_the_step_and_the_figures_that_fit() -> None:
    screen = io.StringIO()
    values = VALUES | {"grad_norm": 0.25, "tokens_seen": 1e6, "validation_loss": 2.25, "peak_memory_gb": 70.5}
    with StepProgress(60, console=Console(file=screen, force_terminal=True, width=80, color_system=None)) as progress:
        progress.update(6, values)
    last = screen.getvalue().split("\x1b[2K")[-1]
    assert last.startswith("step  6/60 ") and "loss 2.5000  validation 2.2500  tokens/s 12,346" in last
    assert "…" not in last and "tokens 1" not in last


def test_summary_shows_what_is_known_and_what_exists(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    folder.timeline.touch()  # of an earlier start of the run
    screen = io.StringIO()
    figures = {"first_loss": 5.5, "last_loss": 1.25, "imbalance_before": 2.0, "bytes_moved": 3.0 * 2**20}
    summary = RunSummary(steps=60, smoothed=10, exported="to/folder", **figures)
    summary = replace(summary, left_out=("2 documents of more than 96 tokens", "1 document without a token to learn"))
    print_summary(summary, folder, [folder.phases_plot], Console(file=screen, width=200))
    shown = screen.getvalue()
    assert "60 steps " in shown and "loss, mean of steps 1 to 10 → 51 to 60" in shown
    assert "5.5000 → 1.2500" in shown
    assert "imbalance at home" in shown
    assert "imbalance: time of attention on the busiest rank over the mean, mean of all steps" in shown
    assert "3.0 MiB" in shown
    assert shown.count("left out") == 2 and "2 documents of more than 96 tokens" in shown
    assert str(folder.metrics) in shown and "to/folder" in shown
    for absent in ("validation", "MFU", "imbalance measured", "timeline", "checkpoint"):
        assert absent not in shown


def test_summary_of_one_step_after_a_resume_lists_what_it_has_drawn(tmp_path: Path) -> None:
    folder, screen = RunFolder(tmp_path), io.StringIO()
    for path in (folder.timeline, folder.phases_plot, folder.config, folder.resumed_config(6)):
        path.touch()
    summary = RunSummary(steps=1, first_step=7, first_loss=3.25, last_loss=3.25)
    print_summary(summary, folder, [folder.timeline], Console(file=screen, width=200))
    shown = screen.getvalue()
    assert ": 1 step, from step 7 on" in shown and "loss, step 7 " in shown and "→" not in shown
    assert "imbalance" not in shown
    assert str(folder.timeline) in shown and str(folder.phases_plot) not in shown
    assert str(folder.resumed_config(6)) in shown and str(folder.config) not in shown
