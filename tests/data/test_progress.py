from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from distca.data import progress


def test_lines_where_there_is_no_terminal(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="distca")
    clock = iter([0.0, 0.0, 10.0, 40.0])
    monkeypatch.setattr(progress, "console", lambda: Console(file=io.StringIO()))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.tokenizing_progress(10 << 20) as advanced:
        for size in (2 << 20, 1 << 20, 3 << 20):
            advanced(size)
    assert caplog.messages == ["tokenizing: 6.0 MiB of 10.0 MiB, 102.4 KiB/s, 40 s to go"], "2 MiB were there before"


@pytest.mark.parametrize("total", [0, 100])
def test_a_bar_on_a_terminal(monkeypatch, total):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda: Console(file=screen, force_terminal=True, width=120))
    with progress.tokenizing_progress(total) as advanced:
        advanced(total)
    assert "tokenizing" in screen.getvalue()
