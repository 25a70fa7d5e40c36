"""The output of ``distca simulate``: a table, and files of figures, speeds and a timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distca.commands.options import check_picture, check_writable, writing
from distca.errors import OptionError
from distca.simulate import Job
from distca.simulate.streams import Span
from distca.versions import command_line
from distca.words import count

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 104  # columns of a terminal that the table needs
_CAPTION = (
    "DistCA: its speed over this mode's; idle: share of the step in which a GPU computes nothing; "
    "exposed: the part of it that waits for bytes"
)


@dataclass(frozen=True)
class Timeline:
    """The first step of the first case that can run, for Perfetto.

    Attributes:
        path: the file (JSON).
        rank: the server that it shows.
    """

    path: str
    rank: int

    def check_rank(self, jobs: Sequence[Job]) -> None:
        """OptionError where the smallest pool has no such server."""
        servers = min(job.servers for job in jobs)
        if self.rank >= servers:
            raise OptionError(f"--timeline_rank is {self.rank}; the pool has servers 0 to {servers - 1}.")

    def write(self, spans: Sequence[Span]) -> None:
        """The file, of what a server did."""
        from distca.train.metrics.plots import write_timeline

        shown = [
            {
                "rank": span.rank,
                "track": span.track,
                "name": span.name,
                "start_us": span.start * 1e6,
                "duration_us": span.seconds * 1e6,
            }
            for span in spans
        ]
        with writing("timeline", self.path):
            write_timeline(self.path, shown)


@dataclass(frozen=True)
class Files:
    """The files that are written beside the table; None or empty for those that are not asked for.

    Attributes:
        output: all figures (JSON).
        picture: speed over GPUs.
        timeline: of one server.
    """

    output: str | None
    picture: str | None
    timeline: Timeline | None

    def check(self) -> None:
        """OptionError where one of them could not be written once everything is predicted, or two are one file."""
        timeline = None if self.timeline is None else self.timeline.path
        paths = {"output": self.output, "timeline": timeline, "picture": self.picture}
        taken: dict[Path, str] = {}
        for option, path in paths.items():
            if path is None:
                continue
            (check_picture if option == "picture" else partial(check_writable, option))(path)
            other = taken.setdefault(Path(path).resolve(), option)
            if other != option:
                raise OptionError(f"--{other} and --{option} are both {path}; give another file for one of them.")


def report(found: list[dict[str, Any]], lengths: str, trained: str, memory_gib: float, files: Files) -> None:
    """Show all cases, and write the files but for the timeline, which is there already.

    Args:
        found: figures of every case, or why it was refused.
        lengths: the documents, as they were asked for.
        trained: the model, and how it is cut.
        memory_gib: of a GPU.
        files: to write.
    """
    from distca.log import printer

    console = printer()
    console.width = max(console.width, _WIDTH)
    console.print(summary(found, f"{trained}, {lengths}", memory_gib))
    for row in found:
        if "refused" in row:
            where = f"{row['mode']} on {count(row['gpus'], 'GPU')} with contexts of {_tokens(row['context'])}"
            console.print(f"{where} is left out: {row['refused']}", soft_wrap=True)
    if files.output:
        content = json.dumps({"command": command_line("distca"), "lengths": lengths, "cases": found}, indent=1)
        with writing("output", files.output):
            Path(files.output).write_text(content + "\n", encoding="utf-8")
    if files.picture:
        with writing("picture", files.picture):
            draw_speeds(found, files.picture)
    timeline = files.timeline and files.timeline.path
    for what, path in (("Figures", files.output), ("Picture", files.picture), ("Timeline", timeline)):
        if path:
            console.print(f"{what} written to {path}.", soft_wrap=True)


def summary(found: list[dict[str, Any]], asked: str, memory_gib: float) -> Table:
    """A table of all cases, below what was asked for; what does not fit into ``memory_gib`` is marked."""
    from rich.markup import escape
    from rich.table import Table

    title = f"Predicted steps of {asked}; memory above that of a GPU is marked *"
    table = Table(title=escape(title), caption=_CAPTION, caption_justify="left")
    for column in ("GPUs", "context", "mode", "step s", "tokens/s", "DistCA", "idle", "exposed", "GiB"):
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=column == "mode")
    for row in found:
        if "refused" in row:
            continue
        name = row["mode"] if row["mode"] == row["chosen"] else f"{row['mode']}: {row['chosen']}"
        own = speed_up(found, row)
        over = row["memory_gib"] > memory_gib
        table.add_row(
            str(row["gpus"]),
            _tokens(row["context"]),
            name.removesuffix("-hidden") if row["mode"] != row["chosen"] else name,
            f"{row['step_s']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            "" if own is None or row["mode"] == "distca" else f"{own:.3f}×",
            f"{row['idle_share']:.1%}",
            f"{row['exposed_share']:.1%}",
            f"{row['memory_gib']:.1f}{'*' if over else ''}",
        )
    return table


def speed_up(found: list[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """DistCA's tokens per second over a row's, on as many GPUs with the same context; None without DistCA."""
    for other in found:
        same = all(other[key] == row[key] for key in ("gpus", "context"))
        if same and other["mode"] == "distca" and "refused" not in other:
            return float(other["tokens_per_s"] / row["tokens_per_s"])
    return None


def draw_speeds(found: list[dict[str, Any]], path: str) -> None:
    """Speed-up of DistCA over every other mode, over GPUs, a line for each context."""
    from matplotlib.figure import Figure

    rows = [row for row in found if "refused" not in row]
    others = [name for name in dict.fromkeys(row["mode"] for row in rows) if name != "distca"]
    gpus = sorted({row["gpus"] for row in rows})
    figure = Figure(figsize=(5 * max(len(others), 1), 4), layout="constrained")
    figure.suptitle("DistCA's speed over that of other modes (simulated)")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, max(len(others), 1), sharey=True)), others, strict=False):
        for context in dict.fromkeys(row["context"] for row in rows):
            mine = [row for row in rows if row["mode"] == name and row["context"] == context]
            values = [(row["gpus"], speed_up(rows, row)) for row in mine]
            points = [(x, y) for x, y in values if y is not None]
            axes.plot(*zip(*points, strict=True), "o-", label=_tokens(context)) if points else None
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(title=f"over {name}", xlabel="GPUs", ylabel="speed-up", xscale="log")
        axes.set_xticks(gpus, [str(each) for each in gpus])
        axes.minorticks_off()
        if axes.get_legend_handles_labels()[1]:
            axes.legend(title="context")
    figure.savefig(path, dpi=120)


def _tokens(context: int) -> str:
    return f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
