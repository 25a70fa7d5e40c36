"""Pictures of a run: attention time per rank before and after balancing, by pipeline phase, and a timeline for
Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distca.plan import imbalance
from distca.train.metrics.phase_table import PhaseTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEFORE, AFTER, MEASURED = "#d1662f", "#2b6cb0", "#1a202c"
PARTS = ("#2b6cb0", "#e0a526", "#3f9c6b", "#8a63b8", "#c2527a")
"""Colours of the kinds of attention layers, in the order of their numbers."""
LINEAR = "#b6bcc6"
"""Colour of linear layers."""


def colors_of(parts: Sequence[str]) -> list[str]:
    """A colour for every kind of attention layer, by name, and for "linear layers"."""
    return [LINEAR if name == "linear layers" else PARTS[number % len(PARTS)] for number, name in enumerate(parts)]


def plot_balance(
    path: Path | str,
    before: Sequence[float] | np.ndarray,
    after: Sequence[float] | np.ndarray | None = None,
    measured: Sequence[float] | np.ndarray | None = None,
    *,
    unit: str = "ms",
    slowest_first: bool = False,
    title: str | None = None,
    parts: Sequence[str] = (),
) -> None:
    """Draw attention time per rank; the file's suffix chooses the format (.png, .svg).

    Args:
        path: file to write.
        before: [ranks] planned time with every document computed at home; or [parts, ranks], stacked.
        after: the same with the plan that ran; None where attention stayed at home.
        measured: [ranks] measured time, in the same unit.
        unit: unit of all three.
        slowest_first: ranks are in the order of their times in each step, so that places are no numbers of ranks.
        title: instead of the sentence that gives the imbalance before and after.
        parts: names of what is stacked, with colours of their own; kinds of attention layers, say.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    first_parts = np.atleast_2d(np.asarray(before, dtype=np.float64))
    second_parts = None if after is None else np.atleast_2d(np.asarray(after, dtype=np.float64))
    assert second_parts is None or first_parts.shape == second_parts.shape
    first, second = first_parts.sum(axis=0), None if second_parts is None else second_parts.sum(axis=0)
    ran, place = (first, 0.0) if second is None else (second, 0.2)
    ranks = np.arange(len(first))
    # A figure of its own, not pyplot: nothing global, and no display is looked for.
    figure = Figure(figsize=(min(14.0, max(7.0, 1.2 + 0.42 * len(ranks))), 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    after_that = "" if second is None else f" at home → {imbalance(second):.2f} planned"
    title = title or f"Attention per rank: imbalance {imbalance(first):.2f}{after_that}"
    label = f"at home: imbalance {imbalance(first):.2f}"
    for name, color in zip(parts, colors_of(parts), strict=True):
        axes.bar([0], [0], color=color, label=name)
    _bars(axes, ranks - place, first_parts, parts, label, BEFORE, hatched=second is not None)
    if second is not None and second_parts is not None:
        label = f"planned: imbalance {imbalance(second):.2f}"
        _bars(axes, ranks + place, second_parts, parts, label, AFTER)
    axes.axhline(float(ran.mean()), color="0.35", linewidth=1, linestyle="--", label="mean")
    if measured is not None:
        times = np.asarray(measured, dtype=np.float64)
        assert times.shape == first.shape
        label = f"measured: imbalance {imbalance(times):.2f}"
        axes.plot(ranks + place, times, "o", color=MEASURED, markersize=4, label=label)
    axes.set_title(title, loc="left")
    axes.set_ylabel(f"attention time ({unit})")
    if slowest_first:
        axes.set_xlabel("ranks in the order of their time in each step")
        axes.set_xticks([0, len(ranks) - 1] if len(ranks) > 1 else [0], ["slowest", "fastest"][: len(ranks)])
    else:
        axes.set_xlabel("rank")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.7, len(ranks) - 0.3)
    axes.set_ylim(0, max(axes.get_ylim()[1], 1e-12))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=2 if len(ranks) < 12 else 4, loc="outside lower center", fontsize=8)
    # A fixed salt and no date, so that the same plan gives the same file.
    with rc_context({"svg.hashsalt": "distca"}):
        figure.savefig(Path(path), metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def _bars(
    axes: Axes,
    x: np.ndarray,
    heights: np.ndarray,
    parts: Sequence[str],
    label: str,
    alone: str,
    hatched: bool = False,
) -> None:
    """Bars of one series: in its colour ``alone``, or where it has ``parts`` one upon the other in theirs."""
    if not parts:
        axes.bar(x, heights.sum(axis=0), 0.4, label=label, color=alone)
        return
    look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0, "hatch": "////" if hatched else None}
    below = np.zeros(len(x))
    for height, color in zip(heights, colors_of(parts), strict=True):
        axes.bar(x, height, 0.4, below, color=color, **look)
        below = below + height
    axes.bar([0], [0], color="0.55", label=label, **look)


def write_timeline(
    path: Path | str, events: Iterable[Mapping[str, Any]], names: Mapping[int, str] | None = None
) -> None:
    """Write recorded spans as a Chrome trace: JSON that ui.perfetto.dev and chrome://tracing open.

    A rank is a process and a track a thread, both named; tracks keep the order steps, compute ping, compute pong,
    then others by name. Times are shifted so that the earliest event starts at 0.

    Args:
        path: file to write.
        events: dicts of ``rank`` (int), ``track`` (str), ``name`` (str), ``start_us`` and ``duration_us`` (float,
            microseconds, one clock for all ranks). Optional: ``args`` (dict, shown on click).
        names: of ranks that are not to be called by their number.
    """
    spans = sorted(events, key=lambda event: event["start_us"])
    origin = spans[0]["start_us"] if spans else 0.0
    order = {name: number for number, name in enumerate(("steps", "compute ping", "compute pong"))}
    others = sorted({span["track"] for span in spans} - set(order))
    order |= {name: len(order) + number for number, name in enumerate(others)}
    trace: list[dict[str, Any]] = []
    for rank in sorted({int(span["rank"]) for span in spans}):
        trace.append(_name("process_name", rank, 0, {"name": (names or {}).get(rank, f"rank {rank}")}))
        trace.append(_name("process_sort_index", rank, 0, {"sort_index": rank}))
        for track in sorted({span["track"] for span in spans if span["rank"] == rank}, key=order.__getitem__):
            trace.append(_name("thread_name", rank, order[track], {"name": track}))
            trace.append(_name("thread_sort_index", rank, order[track], {"sort_index": order[track]}))
    for span in spans:
        place = {"pid": int(span["rank"]), "tid": order[span["track"]], "ts": round(span["start_us"] - origin, 3)}
        event = {"ph": "X", "cat": span["track"], "name": span["name"], "dur": round(span["duration_us"], 3)}
        trace.append(event | place | ({"args": dict(span["args"])} if span.get("args") else {}))
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": trace}), encoding="utf-8")


def _name(kind: str, rank: int, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}


_NAMES = {"at_home": "at home", "planned": "planned", "measured": "measured"}


def _title(table: PhaseTable, name: str) -> str:
    """How level a series is, in words that are no wider than its map."""
    level = table.levels(name)
    said = f"{_NAMES[name]}: imbalance {level['phases']:.2f} over phases"
    return said + (f", with linear layers {level['with_linear']['phases']:.2f}" if "with_linear" in level else "")


def plot_phases(path: Path, table: PhaseTable, stages: int, servers: int = 0) -> None:
    """Draw one heat map per series, each as multiples of its own mean over all ranks and phases. Where layers are of
    several kinds, each kind's part of what is planned follows.

    Args:
        path: the .png or .svg to write.
        table: at least one step.
        stages: pipeline stages, marked by lines.
        servers: without a model, behind the last stage's ranks.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    series = {name: getattr(table, name) for name in _NAMES}
    shown = {name: values for name, values in series.items() if values is not None and values.sum() > 0}
    maps = [(values / values.mean(), _title(table, name)) for name, values in shown.items()]
    kinds = table.planned_by_kind()
    planned = sum(values.mean() for values in kinds.values())
    for name, values in kinds.items():
        of_all = values / planned
        maps.append((of_all, f"planned, in layers of kind {name}: {100 * of_all.mean():.0f} % of it"))
    phases, ranks = maps[0][0].shape
    width = max(6.0, 1.6 + 0.3 * phases)  # the titles need this much
    figure = Figure(figsize=(width, 0.9 + len(maps) * (0.75 + 0.22 * max(ranks, 4))), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    highest = max(float(values.max()) for values, _ in maps)
    for axes, (values, title) in zip(figure.subplots(len(maps), 1, squeeze=False)[:, 0], maps, strict=True):
        image = axes.imshow(values.T, cmap="viridis", vmin=0, vmax=highest, aspect="auto")
        for stage in range(1, stages + bool(servers)):
            axes.axhline(stage * (ranks - servers) // stages - 0.5, color="white", linewidth=0.8)
        axes.axvline(phases // 2 - 0.5, color="white", linewidth=1.6)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylabel("rank, by stage", fontsize=8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=7)
    axes.set_xlabel("phase: all forward | all backward", fontsize=8)
    bar = figure.colorbar(image, ax=figure.axes, fraction=0.03)
    bar.set_label("attention time, 1 = mean", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path)
