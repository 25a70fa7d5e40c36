"""Draw the pictures of the README and the pages about concepts, as docs/images/*.svg.

    python docs/draw_pictures.py

Plans in them are real: documents are drawn from the Pretrain mix with a fixed seed, and times are those of the
planner's analytic cost model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from distca.data.mixes import sample_lengths
from distca.plan import MicroBatchPlan, Shards, analytic_cost, plan_micro_batch
from distca.train.metrics.plots import plot_balance

IMAGES = Path(__file__).parent / "images"
# Text stays text, so that it can be searched and copied; a fixed salt and no date make the same file each time.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "distca", "font.family": ["DejaVu Sans", "sans-serif"]}
PING, PONG, SERVED, WIRE, PLAIN = "#bcd4f0", "#f6d3b8", "#cfe8d5", "#e9e2f3", "#eef0f3"
EDGE, INK = "#5a6474", "#1a202c"

Point = tuple[float, float]


class Picture:
    """Boxes, arrows and words in a plane of ``width`` × ``height`` units, of which 10 are an inch."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width / 10, height / 10), dpi=150)
        FigureCanvasAgg(self.figure)
        self.axes: Axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")

    def box(self, at: Point, size: Point, text: str = "", color: str = PLAIN, **look: Any) -> None:
        """A box with its lower left corner ``at``, and words in its middle."""
        style = "round,pad=0,rounding_size=0.6"
        self.axes.add_patch(FancyBboxPatch(at, *size, boxstyle=style, facecolor=color, edgecolor=EDGE, linewidth=0.8))
        self.words((at[0] + size[0] / 2, at[1] + size[1] / 2), text, **look)

    def words(self, at: Point, text: str, **look: Any) -> None:
        """Words around a point."""
        self.axes.text(*at, text, **({"ha": "center", "va": "center", "fontsize": 8, "color": INK} | look))

    def arrow(self, start: Point, end: Point, text: str = "", above: float = 1.2, **look: Any) -> None:
        """An arrow, with words beside its middle."""
        style = {"arrowstyle": "-|>", "color": look.pop("color", EDGE), "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
        style |= {"linestyle": look.pop("linestyle", "-"), "connectionstyle": look.pop("bend", "arc3")}
        self.axes.annotate("", end, start, arrowprops=style)
        self.words(((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + above), text, **({"fontsize": 7.5} | look))

    def save(self, name: str) -> None:
        with rc_context(STYLE):
            self.figure.savefig(IMAGES / name, metadata={"Date": None})


def balance() -> None:
    """Attention of 16 ranks, at home and planned."""
    ranks, tokens = 16, 65_536
    lengths = sample_lengths("pretrain", ranks * tokens, seed=0)
    plan = plan_micro_batch(lengths, ranks, analytic_cost(heads=32, kv_heads=8, head_dim=128))
    mean = plan.seconds_before.mean()
    plot_balance(
        IMAGES / "balance.svg",
        plan.seconds_before / mean,
        plan.seconds_after / mean,
        unit="mean at home = 1",
        title=f"Planned attention time of {ranks} ranks, {tokens // 1024}K tokens each (Pretrain mix)",
    )


def step() -> None:
    """One step: what is planned meanwhile, and when the threads wait."""
    picture = Picture(96, 27)
    for y, name in ((20, "planning thread"), (11, "training thread"), (2, "GPU")):
        picture.words((0.5, y + 2.5), name, ha="left", weight="bold")
        picture.axes.axhline(y - 1.2, 0.0, 1.0, color="#d8dce2", linewidth=0.8)
    picture.box((14, 20), (27, 5.4), "step n: lengths → layouts → plan →\nroutes; this rank's tokens", WIRE)
    picture.box((51, 20), (27, 5.4), "step n + 1: the same", WIRE)
    picture.box((42, 11), (15, 5.4), "queues all work\nof step n")
    picture.box((81, 11), (14, 5.4), "optimizer step")
    picture.box((42, 2), (38, 5.4), "forward and backward of all micro-batches", SERVED)
    picture.box((81, 2), (14, 5.4), "update", SERVED)
    picture.arrow((39, 20), (44, 7.5))
    picture.words((40, 9.2), "rows and routes,\none transfer", ha="right", fontsize=7.5)
    picture.arrow((53, 16.5), (53, 19.9))
    picture.words((54, 18.2), "begin with the next step", ha="left", fontsize=7.5)
    picture.arrow((79.5, 7.5), (83, 10.9))
    picture.words((79.5, 9.2), "loss and gradient norm: the one wait", ha="right", fontsize=7.5)
    picture.save("step.svg")


def way_of_a_row() -> None:
    """The rows that travel between a home rank and an attention server, and back."""
    picture = Picture(92, 27)
    picture.box((1, 1), (26, 25), "", "#f8f9fb")
    picture.words((14, 24), "home rank", weight="bold")
    picture.box((4, 14), (20, 7), "pre: norm,\nQKV, rotation", PING)
    picture.box((4, 3), (20, 7), "post: projection,\nMLP", PING)
    picture.box((54, 1), (37, 25), "", "#f8f9fb")
    picture.words((72.5, 24), "attention server (any rank)", weight="bold")
    picture.box((57, 14), (31, 7), "rows of all senders, each once;\na region [0, b) for each task", SERVED)
    picture.box((57, 3), (31, 7), "one kernel\nover all tasks", SERVED)
    picture.arrow((24, 17.5), (57, 17.5), "q of the tasks' rows;\nk, v of their context", 2.2)
    picture.arrow((72.5, 14), (72.5, 10))
    picture.arrow((57, 6.5), (24, 6.5), "o of the tasks' rows")
    picture.save("way_of_a_row.svg")


ROOMS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("distca/commands", "command line"),),
    (("distca/train", "trainer"),),
    (("distca/parity", "held against unmodified Megatron-Core"),),
    (("megatron_patches", "all that knows Megatron-Core"),),
    (("distca/profile", "measured costs"), ("distca/simulate", "predicted steps")),
    (
        ("distca/runtime", "autograd nodes, ping-pong"),
        ("distca/baselines", "other placements"),
        ("distca/testing", "references"),
    ),
    (
        ("distca/attention", "kernels"),
        ("distca/transport", "moving rows"),
        ("distca/recurrent", "recurrent cores"),
        ("distca/models", "folders"),
        ("distca/data", "documents"),
    ),
    (("distca/ops", "norms, rotation, loss"),),
    (("distca/cluster", "ranks, nodes"), ("distca/device", "clocks, copies")),
    (("distca/plan", "numpy only"),),
)


def tree() -> None:
    """Packages by rows: each imports from rows below its own alone."""
    picture = Picture(92, 5.2 * len(ROOMS) + 0.5)
    for number, row in enumerate(ROOMS):
        y, width = 5.2 * (len(ROOMS) - 1 - number) + 0.8, min(40.0, 91 / len(row) - 1.5)
        left = (92 - len(row) * (width + 1.5) + 1.5) / 2
        for place, (name, what) in enumerate(row):
            color = WIRE if name == "megatron_patches" else SERVED if name == "distca/plan" else PLAIN
            picture.box((left + place * (width + 1.5), y), (width, 4.4), f"{name}\n{what}", color, fontsize=7)
    picture.save("tree.svg")


def ping_pong() -> None:
    """Two layers on one rank: transfers of one nano-batch run beside the other's computation."""
    picture = Picture(98, 17)
    for y, name in ((9.5, "computes"), (3.2, "transfers")):
        picture.words((0.5, y + 2.2), name, ha="left", weight="bold")
    compute = ("pre", "pre", "serve", "serve", "post + pre", "post + pre", "serve", "serve")
    wire = ("", "q, k, v", "q, k, v", "o", "o", "q, k, v", "q, k, v", "o")
    for place in range(8):
        x = 11 + 10.8 * place
        picture.box((x, 9.5), (10.4, 4.6), compute[place], PONG if place % 2 else PING)
        if wire[place]:
            picture.box((x, 3.2), (10.4, 4.6), wire[place], PING if place % 2 else PONG)
    picture.words((54, 15.6), "layer i → layer i + 1", fontsize=7.5)
    for x, name, color in ((40, "ping", PING), (55, "pong", PONG)):
        picture.box((x, 0.5), (3, 1.6), "", color)
        picture.words((x + 4, 1.3), name, ha="left", fontsize=7.5)
    picture.save("ping_pong.svg")


def two_hops() -> None:
    """Keys and values for several readers on another node travel there once."""
    picture = Picture(92, 24)
    picture.box((1, 1), (22, 22), "", "#f8f9fb")
    picture.words((12, 21), "node 0", weight="bold")
    picture.box((4, 7), (16, 8), "home of\nthe rows", PING)
    picture.box((50, 1), (41, 22), "", "#f8f9fb")
    picture.words((70.5, 21), "node 1", weight="bold")
    picture.box((53, 7), (12, 8), "gateway", SERVED)
    picture.box((76, 12.5), (13, 6.5), "reader", SERVED)
    picture.box((76, 3), (13, 6.5), "reader", SERVED)
    picture.arrow((20, 13), (53, 13), "k, v once, over the network")
    picture.arrow((53, 9), (20, 9), "dK, dV: one sum", -1.4, linestyle="--")
    for y in (15.8, 6.2):
        up = y > 11
        picture.arrow((65, 12.5 if up else 10.5), (76, y + (0.8 if up else 0.0)))
        picture.arrow((76, y - 1.4), (65, 11.4 if up else 8.4), linestyle="--")
    picture.words((70, 17.4), "k, v")
    picture.words((70, 4.8), "dK, dV")
    picture.save("two_hops.svg")


def symmetric_memory() -> None:
    """Signals by which a sender and a receiver agree on a place in memory."""
    picture = Picture(92, 34)
    lanes = ((14, "sender,\ntransfer stream"), (46, "receiver's\nsymmetric memory"), (78, "receiver,\ncompute stream"))
    for x, name in lanes:
        picture.box((x - 11, 28.5), (22, 5), name, WIRE, weight="bold")
        picture.axes.plot((x, x), (0.5, 28.5), color="#c5cad3", linewidth=1.0, zorder=0)
    picture.arrow((46, 24), (14, 24), "wait until consumed ≥ the exchange\nwhose place is used again", 2.0)
    picture.arrow((14, 18), (46, 18), "copy rows into the place of exchange n")
    picture.arrow((14, 14), (46, 14), "arrived = n")
    picture.arrow((46, 10), (78, 10), "wait until arrived ≥ n")
    picture.words((79, 7.2), "place rows\nin tensors", ha="left", fontsize=7.5)
    picture.arrow((78, 3.5), (14, 3.5), "consumed = n, to all peers")
    picture.save("symmetric_memory.svg")


def planning() -> None:
    """The plan of eight ranks: documents as they come, where they live in the layout, and who computes them."""
    ranks, tokens = 8, 131_072
    lengths = sample_lengths("pretrain", ranks * tokens, seed=0)
    plan = plan_micro_batch(lengths, ranks, analytic_cost(32, 8, 128), nano_batches=2)
    figure = Figure(figsize=(9.6, 3.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    one, two, three = figure.subplots(1, 3, sharey=True)
    colors = {int(document): f"C{place}" for place, document in enumerate(np.argsort(-lengths, kind="stable")[:6])}
    _as_they_come(one, lengths, tokens, colors)
    one.set(title="1. as documents come", xlabel="tokens of a rank (K)", ylabel="rank")
    offset = np.zeros(ranks)
    for nano in plan.nano_batches:
        _shards(two, nano.layout.q, offset, colors)
        offset = offset + nano.layout.q_rows / 1024
    two.axvline(plan.nano_batches[0].layout.q_rows.mean() / 1024, color=INK, linewidth=1)
    two.set(title="2. laid out: ping | pong", xlabel="tokens of a rank (K)")
    _served(three, plan, colors)
    three.set(title="3. scheduled", xlabel="attention of a server (ms, forward)")
    for axes in (one, two, three):
        axes.set(ylim=(ranks - 0.5, -0.5), yticks=range(ranks))
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("colours: the six longest documents; grey: all others; hatched: computed for another rank", size=8)
    with rc_context(STYLE):
        figure.savefig(IMAGES / "planning.svg", metadata={"Date": None})


def _as_they_come(axes: Axes, lengths: np.ndarray, tokens: int, colors: dict[int, str]) -> None:
    """Documents in their order, cut where a rank is full."""
    start = np.cumsum(lengths) - lengths
    for document, (first, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
        for rank in range(first // tokens, (first + length - 1) // tokens + 1):
            left, right = max(first - rank * tokens, 0), min(first + length - rank * tokens, tokens)
            axes.barh(rank, (right - left) / 1024, 0.7, left / 1024, color=colors.get(document, "#d3d7de"))


def _shards(axes: Axes, shards: Shards, offset: np.ndarray, colors: dict[int, str]) -> None:
    """The rows of one nano-batch on their home ranks."""
    at = offset.copy()
    for rank in range(len(offset)):
        mine = shards.on_rank(rank)
        for document, start, stop in zip(mine.document.tolist(), mine.start, mine.stop, strict=True):
            width = float(stop - start) / 1024
            axes.barh(rank, width, 0.7, at[rank], color=colors.get(document, "#d3d7de"))
            at[rank] += width


def _served(axes: Axes, plan: MicroBatchPlan, colors: dict[int, str]) -> None:
    """Forward milliseconds of every server, by document, and hatched where rows live elsewhere."""
    ranks = plan.nano_batches[0].layout.ranks
    names = [*colors, -1]
    found = np.zeros((2, len(names), ranks))
    for nano in plan.nano_batches:
        tasks, reads = nano.forward.tasks, nano.forward.q_reads
        length = tasks.stop - tasks.start
        seconds = nano.cost.forward(length, tasks.stop)[reads.task] * reads.rows / length[reads.task]
        document = [names.index(each) if each in colors else len(colors) for each in tasks.document[reads.task]]
        away = (reads.home != reads.server).astype(int)
        np.add.at(found, (away, document, reads.server), seconds * 1e3)
    left = np.zeros(ranks)
    for away, hatch in enumerate(("", "////")):
        for place, name in enumerate(names):
            axes.barh(
                range(ranks), found[away, place], 0.7, left,
                color=colors.get(name, "#d3d7de"), hatch=hatch, edgecolor="white" if hatch else "none", linewidth=0,
            )  # fmt: skip
            left = left + found[away, place]


def kinds() -> None:
    """Draws which keys a query sees in layers of each kind, for a document that lies on two ranks."""
    rows, figure = 12, Figure(figsize=(9.6, 3.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    q, k = np.indices((rows, rows))
    seen = {"full": k <= q, "window of 4 keys": (k <= q) & (k > q - 4), "sinks": k <= q, "recurrent": k == q}
    travels = {
        "full": "k, v of all rows before",
        "window of 4 keys": "the halo: k, v of 3 rows",
        "sinks": "as without them",
        "recurrent": "one state, whatever the length",
    }
    for axes, (name, mask) in zip(figure.subplots(1, 4), seen.items(), strict=True):
        for row, key in zip(*np.nonzero(mask), strict=True):
            far = row >= rows // 2 and key < rows // 2
            color = "#d1662f" if far else PING
            axes.add_patch(Rectangle((key, row), 1, 1, facecolor=color, edgecolor="white", linewidth=0.8))
        if name == "sinks":
            axes.add_patch(Rectangle((-1.6, 0), 1, rows, facecolor="#3f9c6b"))
        if name == "recurrent":
            for row in range(rows - 1):
                axes.annotate("", (row + 1.5, row + 1.5), (row + 0.5, row + 0.5), arrowprops={"arrowstyle": "-|>"})
        axes.axhline(rows / 2, color=INK, linewidth=0.8, linestyle="--")
        axes.set(xlim=(-2, rows), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[rows / 4, 3 * rows / 4])
        axes.set_yticklabels(["rank 0", "rank 1"] if name == "full" else ["", ""], rotation=90, va="center", size=8)
        axes.tick_params(length=0)
        axes.set_title(name, size=9)
        axes.set_xlabel(travels[name], size=8)
        axes.spines[:].set_visible(False)
    legend = "rows: queries, columns: keys; orange: keys on the other rank; green: a learned score for each head"
    figure.supxlabel(legend, size=8)
    with rc_context(STYLE):
        figure.savefig(IMAGES / "kinds.svg", metadata={"Date": None})


def scan() -> None:
    """Summaries of the pieces of one document, and the state that each piece begins with."""
    picture = Picture(92, 23)
    pieces = (("rank 0", "first piece", "begins with 0"), ("rank 1", "second piece", "begins with B₀"))
    last = ("rank 2", "last piece", "begins with A₁·B₀ + B₁")
    for place, (rank, piece, begins) in enumerate((*pieces, last)):
        x = 2 + 32 * place
        picture.box((x, 4), (24, 11), f"{piece}\n{begins}", (PING, SERVED, PONG)[place])
        picture.words((x + 12, 2), rank, weight="bold")
    picture.arrow((26, 9.5), (34, 9.5), "B₀")
    picture.arrow((58, 9.5), (66, 9.5), "A₁, B₁")
    picture.arrow((14, 15), (78, 15), "B₀", 6.2, bend="arc3,rad=-0.15")
    picture.save("scan.svg")


PICTURES: Sequence[Any] = (
    *(balance, step, way_of_a_row, tree, ping_pong, two_hops, symmetric_memory, planning, kinds, scan),
)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for draw in PICTURES:
        with rc_context(STYLE):
            draw()


if __name__ == "__main__":
    main()
