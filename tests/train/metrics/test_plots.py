import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from distca.train.metrics.plots import colors_of, plot_balance, write_timeline


def event(rank: int, track: str, name: str, start: float, duration: float = 5.0, **more: object) -> dict[str, object]:
    return {"rank": rank, "track": track, "name": name, "start_us": start, "duration_us": duration, **more}


def test_balance_picture_changes_with_its_numbers(tmp_path: Path) -> None:
    before, after = [1.0, 9.0, 2.0, 4.0], [4.0, 4.1, 3.9, 4.0]
    plot_balance(tmp_path / "a.png", before, after)
    plot_balance(tmp_path / "b.png", before, after, np.array([4.0, 4.2, 4.1, 4.0]))
    first, second = imread(tmp_path / "a.png"), imread(tmp_path / "b.png")
    assert first.shape == second.shape
    assert min(first.shape[:2]) > 300
    assert (first != second).any()


def test_svg_says_the_imbalance_and_is_reproducible(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_balance(tmp_path / name, [1.0, 3.0], [2.0, 2.0])
    text = (tmp_path / "a.svg").read_text()
    assert "imbalance 1.50 at home → 1.00 planned" in text  # matplotlib keeps texts as comments
    assert text == (tmp_path / "b.svg").read_text()


def test_attention_that_stays_at_home_is_one_series(tmp_path: Path) -> None:
    plot_balance(tmp_path / "a.svg", [1.0, 3.0], None, [1.5, 2.5])
    text = (tmp_path / "a.svg").read_text()
    assert "at home: imbalance 1.50" in text and "measured: imbalance 1.25" in text
    assert "planned" not in text and "→" not in text


def test_parts_are_stacked_and_named(tmp_path: Path) -> None:
    before, after, parts = [[1.0, 2.0], [0.0, 3.0]], [[2.0, 1.0], [1.0, 2.0]], ["full", "window 1,024"]
    plot_balance(tmp_path / "parts.svg", before, after, parts=parts)
    text = (tmp_path / "parts.svg").read_text()
    assert "imbalance 1.67 at home → 1.00 planned" in text
    for name, color in zip(parts, colors_of(parts), strict=True):
        assert text.count(f"<!-- {name} -->") == 1, "in the legend"
        assert text.count(f"fill: {color}") == 2 + 2, "two bars; the bar without height that the legend shows"
    assert "at home: imbalance 1.67" in text and "planned: imbalance 1.00" in text


def test_kinds_have_colours_of_their_own() -> None:
    assert len(set(colors_of(["full", "window 4,096", "window 128", "linear layers"]))) == 4


def test_places_by_time_are_no_numbers_of_ranks(tmp_path: Path) -> None:
    plot_balance(tmp_path / "a.svg", [3.0, 2.0, 1.0], [2.0, 2.0, 2.0], slowest_first=True)
    text = (tmp_path / "a.svg").read_text()
    assert "<!-- slowest -->" in text and "<!-- fastest -->" in text and "<!-- 2 -->" not in text


@pytest.mark.parametrize("ranks", [1, 200])
def test_any_number_of_ranks_and_no_work_at_all(tmp_path: Path, ranks: int) -> None:
    plot_balance(tmp_path / "a.png", np.zeros(ranks), np.zeros(ranks))
    assert imread(tmp_path / "a.png").size


def test_timeline_names_ranks_and_tracks_and_starts_at_zero(tmp_path: Path) -> None:
    events = [
        event(1, "transfers", "q,k,v", 1010.0),
        event(0, "compute pong", "post", 1005.5, 2.5, args={"layer": 3}),
        event(0, "compute ping", "pre", 1000.0),
        event(0, "other", "step", 1001.0),
    ]
    write_timeline(tmp_path / "t.json", events)
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    processes = {entry["pid"]: entry["args"]["name"] for entry in trace if entry["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    assert list(threads.values()) == ["compute ping", "compute pong", "other", "transfers"]
    spans = {entry["name"]: entry for entry in trace if entry["ph"] == "X"}
    assert (spans["pre"]["ts"], spans["post"]["ts"], spans["post"]["dur"]) == (0.0, 5.5, 2.5)
    assert spans["post"]["args"] == {"layer": 3}
    assert threads[spans["q,k,v"]["pid"], spans["q,k,v"]["tid"]] == "transfers"


def test_empty_timeline_is_valid(tmp_path: Path) -> None:
    write_timeline(tmp_path / "t.json", [])
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
