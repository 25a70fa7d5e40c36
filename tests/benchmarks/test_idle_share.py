"""The idle share of a recorded step, from hand-made traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pipeline import idle_shares
from distca.train.metrics.plots import write_timeline


def _span(rank: int, track: str, start: float, stop: float) -> dict[str, object]:
    return {"rank": rank, "track": track, "name": "x", "start_us": start, "duration_us": stop - start}


def test_overlapping_spans_count_once_and_transfers_not_at_all(tmp_path: Path) -> None:
    spans = [
        _span(0, "compute ping", 100, 150),
        _span(0, "compute pong", 140, 200),
        _span(0, "stage", 120, 130),
        _span(0, "transfers", 0, 400),
        _span(1, "stage", 150, 300),
    ]
    write_timeline(tmp_path / "trace.json", spans)
    shares = idle_shares(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert shares == pytest.approx({0: 0.5, 1: 0.25})


def test_nothing_recorded() -> None:
    assert idle_shares([]) == {}
