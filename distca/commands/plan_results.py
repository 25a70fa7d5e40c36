"""The output of ``distca plan``: a table of a plan's balance, bytes and memory, and a picture of who serves whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distca.plan import MicroBatchPlan, Traffic, context_rows, imbalance, traffic
from distca.plan.metrics import makespan_bounds
from distca.train.metrics.plots import colors_of
from distca.words import count, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from distca.commands.plan_recurrent import RecurrentFigures


def summary(made: MicroBatchPlan, layers: int = 1, recurrent: RecurrentFigures | None = None) -> Table:
    """A table of what the plan achieves; bytes are those of ``layers`` layers with attention, all ranks together.
    ``recurrent``: what other layers move."""
    from rich.table import Table

    documents, ranks = count(len(made.lengths), "document"), made.nano_batches[0].layout.ranks
    title = f"{documents}, {count(int(made.lengths.sum()), 'token')} on {count(ranks, 'rank')}"
    caption = "imbalance: attention time of the busiest rank over the mean"
    table = Table(title=title, show_header=True, caption=caption, caption_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    moved, shape, shortest = made.bytes_of_layers(layers), made.cost.shape, shortest_shard(made)
    everywhere, busiest = f"all ranks, {count(layers, 'layer')}", busiest_rank(made)
    rows = [
        ("query heads, key/value heads, size of a head", f"{shape.heads}, {shape.kv_heads}, {shape.head_dim}"),
        ("imbalance at home, documents in order", f"{made.imbalance_before:.3f}"),
        ("imbalance at home, documents placed by work", f"{imbalance(made.seconds_at_home):.3f}"),
        ("imbalance planned", f"{made.imbalance_after:.3f}"),
        (
            "slowest server over the least that any plan reaches",
            f"{float(made.seconds_after.max()) / lower_bound(made):.3f}",
        ),
        ("slowest server, one layer, forward and backward", f"{made.seconds_after.max() * 1e3:.2f} ms"),
        (f"q to servers, {everywhere}", format_bytes(moved.q)),
        (f"o back home, {everywhere}", format_bytes(moved.o)),
        (f"k,v to servers, {everywhere}", format_bytes(moved.kv)),
        (f"backward, {everywhere}", format_bytes(moved.backward)),
        ("most received at once by one server, forward, one layer", format_bytes(most_received(made))),
        (
            "most sent or received by one rank, forward, one layer",
            f"{format_bytes(busiest.bytes)}, {busiest.over_mean:.1f} times the mean",
        ),
        *node_rows(made, layers),
        *half_rows(made, layers),
        *server_rows(made, layers),
        ("shortest shard sent away", count(shortest, "token") if shortest else "none"),
        *kind_rows(made),
        *(recurrent.rows() if recurrent else ()),
        ("planning", f"{made.planning_ms:.1f} ms"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def figures(made: MicroBatchPlan, layers: int = 1, recurrent: RecurrentFigures | None = None) -> dict[str, Any]:
    """The numbers of :func:`summary`, in seconds and bytes, by name; bytes are those of ``layers`` layers, all ranks
    together, unless a name says one layer."""
    moved, shape, options = made.bytes_of_layers(layers), made.cost.shape, made.step.options
    kinds = [made.of_kind(number) for number in range(len(options.names_of_combinations))]
    return {
        "documents": len(made.lengths),
        "tokens": int(made.lengths.sum()),
        "ranks": made.nano_batches[0].layout.ranks,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "slowest_over_mean_in_order": made.imbalance_before,
        "slowest_over_mean_spread": imbalance(made.seconds_at_home),
        "slowest_over_mean_planned": made.imbalance_after,
        "slowest_over_lower_bound": float(made.seconds_after.max()) / lower_bound(made),
        "seconds_of_one_layer_by_server": made.seconds_after.tolist(),
        "layers": layers,
        "q_bytes": moved.q,
        "o_bytes": moved.o,
        "kv_bytes": moved.kv,
        "backward_bytes": moved.backward,
        "most_received_bytes_of_one_layer": most_received(made),
        "busiest_rank_bytes_of_one_layer": busiest_rank(made).bytes,
        "shortest_shard_sent": shortest_shard(made),
        "memory_bytes_of_servers_without_a_model": server_bytes(made, layers).tolist(),
        "kinds": {
            name: {"slowest_over_mean": each.imbalance_after, "bytes_of_one_layer": each.bytes_moved.total}
            for name, each in zip(options.names_of_combinations, kinds, strict=True)
        },
        "recurrent": recurrent.figures() if recurrent else None,
        "planning_s": made.planning_ms / 1e3,
    }


def kind_rows(made: MicroBatchPlan) -> list[tuple[str, str]]:
    """A row for the plan of each kind of layer, where the model has several."""
    names = made.step.options.names_of_combinations
    if len(names) == 1:
        return []
    found = [made.of_kind(number) for number in range(len(names))]
    return [
        (
            f"{name}: imbalance planned, bytes of one",
            f"{each.imbalance_after:.3f}, {format_bytes(each.bytes_moved.total)}",
        )
        for name, each in zip(names, found, strict=True)
    ]


def lower_bound(made: MicroBatchPlan) -> float:
    """Seconds of forward and backward of one layer in which no plan of these layouts has its slowest server end.

    A server's seconds are added up over nano-batches. Their costliest rows may be on different servers, so only one of
    them counts; if q, k and v travel again, so may be those of forward and backward.
    """
    on_servers, evenly, of_a_row = made.step.options.on_servers, 0.0, 0.0
    for nano in made.every_nano_batch:
        even, row = makespan_bounds(nano.layout, on_servers(nano.cost), "both")
        evenly += nano.share * float(even.sum())
        of_a_row = max(of_a_row, nano.share * float(row.max() if made.resend else row.sum()))
    return max(evenly, of_a_row)


def most_received(made: MicroBatchPlan) -> int:
    """Bytes of q, k and v rows that the busiest receiver takes in for one nano-batch's forward."""
    shape = made.cost.shape
    moved = [traffic(nano.forward) for nano in made.every_nano_batch]
    received = [rows.q.received * shape.q_bytes + rows.kv.received * shape.kv_bytes for rows in moved]
    return int(np.max(received))


@dataclass(frozen=True)
class Busiest:
    """The rank that moves most in forward, all nano-batches together.

    Attributes:
        bytes: of q, o, k and v in its larger direction.
        over_mean: them over the mean rank's; 1 where nothing moves.
    """

    bytes: int
    over_mean: float


def busiest_rank(made: MicroBatchPlan) -> Busiest:
    """Bytes of the busiest rank in the forward of one layer."""
    shape = made.cost.shape
    options = made.step.options
    both, _ = shape.moved_bytes("forward", made.resend, options.sinks)
    moved = np.sum(
        [
            nano.share
            * traffic(nano.forward, options.links).busiest(shape.q_bytes, both - shape.q_bytes, shape.kv_bytes)
            for nano in made.every_nano_batch
        ],
        axis=0,
    )
    return Busiest(int(moved.max()), imbalance(moved))


def node_rows(made: MicroBatchPlan, layers: int) -> list[tuple[str, str]]:
    """Returns the row on bytes that travel between nodes; none where all ranks are on one node."""
    links = made.step.options.links
    nodes = links.nodes(made.step.options.pool_ranks)
    if nodes[-1] == 0:
        return []
    moved = [(nano.share, traffic(nano.forward, links)) for nano in made.every_nano_batch]
    far = sum(share * forward_bytes(made, rows.between(nodes)) for share, rows in moved)
    every = sum(share * forward_bytes(made, rows) for share, rows in moved)
    share = f", {100 * far / every:.1f} % of all" if every else ""
    name = f"between {count(int(nodes[-1]) + 1, 'node')}, forward, {count(layers, 'layer')}"
    return [(name, format_bytes(round(far * layers)) + share)]


def half_rows(made: MicroBatchPlan, layers: int) -> list[tuple[str, str]]:
    """Returns the row on bytes that travel in ping and in pong; none where a micro-batch is not cut in two."""
    halves = len(made.nano_batches)
    if halves == 1:
        return []
    moved = [nano.share * forward_bytes(made, traffic(nano.forward)) * layers for nano in made.every_nano_batch]
    each = [format_bytes(round(sum(moved[half::halves]))) for half in range(halves)]
    return [(f"in ping and in pong, forward, {count(layers, 'layer')}", " and ".join(each))]


def server_rows(made: MicroBatchPlan, layers: int) -> list[tuple[str, str]]:
    """Returns the row on memory of servers without a model; none without any."""
    found = server_bytes(made, layers)
    if not len(found):
        return []
    name = f"memory of the fullest of {count(len(found), 'server')} without a model, {count(layers, 'layer')}"
    return [(name, format_bytes(int(found.max())))]


def forward_bytes(made: MicroBatchPlan, rows: Traffic) -> int:
    """Bytes of rows that travel in the forward of one layer."""
    q_bytes, kv_bytes = made.cost.shape.moved_bytes("forward", made.resend, made.step.options.sinks)
    return rows.q_rows * q_bytes + rows.kv_rows * kv_bytes


def shortest_shard(made: MicroBatchPlan) -> int:
    """Query rows of the shortest range that is computed away from its home rank; 0 when nothing moves."""
    shortest: list[int] = []
    for nano in made.every_nano_batch:
        reads = nano.forward.q_reads
        shortest += reads.rows[reads.home != reads.server].tolist()
    return min(shortest, default=0)


def draw(made: MicroBatchPlan, path: str, lengths: str) -> None:
    """Draw who computes what for whom (forward seconds by server, split by home rank) into an image file.

    Args:
        made: the plan.
        path: the image.
        lengths: the mix or file that the documents are from, for the title.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ranks = made.nano_batches[0].layout.ranks
    matrix = seconds_by_home(made) * 1e3
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    documents, tokens = count(len(made.lengths), "document"), count(int(made.lengths.sum()), "token")
    title = f"{lengths}: {documents}, {tokens} on {count(ranks, 'rank')}"
    figure.suptitle(title, parse_math=False)  # a path may have dollars
    before, after, who = figure.subplots(1, 3, width_ratios=(1, 1, 1.3))
    balance = made.step.balance()
    series = [by_kind.sum(axis=1) * 1e3 for by_kind in (balance.before_by_kind, balance.after_by_kind)]
    names = [kind.name for kind in made.step.options.kinds]
    several = len(names) > 1
    top = (1.05 + 0.1 * several * len(names)) * max(float(each.sum(axis=0).max()) for each in series)
    unit = "attention ms, mean of all layers" if several else "attention ms, one layer"
    for axes, by_kind, title in zip((before, after), series, ("documents in order, at home", "planned"), strict=True):
        below = np.zeros(made.step.options.pool_ranks)
        for name, milliseconds, color in zip(names, by_kind, colors_of(names), strict=True):
            axes.bar(np.arange(len(below)), milliseconds, 1.0, below, label=name if several else None, color=color)
            below = below + milliseconds
        axes.axhline(float(below.mean()), color="black", linewidth=0.8, label="mean")
        axes.set(title=title, xlabel="rank", ylabel=f"{unit}, forward and backward", ylim=(0, top))
    before.legend(frameon=False, loc="upper right", reverse=True)
    image = who.imshow(np.where(matrix > 0, matrix, np.nan), origin="upper", aspect="auto", vmin=0, cmap="YlGnBu")
    who.set(title="who computes for whom", xlabel="server", ylabel="home rank")
    for axis in (before.xaxis, after.xaxis, who.xaxis, who.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))  # ranks have whole numbers
    figure.colorbar(image, ax=who, label="forward ms, white where nothing")
    figure.savefig(path, dpi=120)


def seconds_by_home(made: MicroBatchPlan) -> np.ndarray:
    """[R, S] forward seconds of one layer by home rank and server, over all nano-batches; a task that spans home ranks
    is split by its rows. Servers without a model come last."""
    matrix = np.zeros((made.nano_batches[0].layout.ranks, made.step.options.pool_ranks))
    for nano in made.every_nano_batch:
        tasks = nano.forward.tasks
        length, reads = tasks.stop - tasks.start, nano.forward.q_reads
        seconds = nano.cost.forward(length, tasks.stop)[reads.task] * reads.rows / length[reads.task]
        np.add.at(matrix, (reads.home, reads.server), nano.share * seconds)
    return matrix


_LSE_BYTES = 4
"""Bytes of the log-sum-exp of a query head and row, in float32."""


def server_bytes(made: MicroBatchPlan, layers: int) -> np.ndarray:
    """[S] int64 bytes of every server without a model when backward begins: what it keeps of the micro-batch in so many
    ``layers``, and what the kernel's backward of one nano-batch takes. With resend it keeps nothing.

    Kept are q, k, v, o and log-sum-exp. At work are float32 gradients of all rows and rounded ones, dO, o put together,
    and copies of keys that tasks share; with resend also the rows themselves.
    """
    shape, homes = made.cost.shape, made.step.options.homes
    kept = np.zeros(made.step.options.pool_ranks)
    at_work = np.zeros_like(kept)
    for nano in made.every_nano_batch:
        tasks = nano.backward.tasks
        q = np.bincount(tasks.server, tasks.stop - tasks.start, len(kept))
        once, copied = context_rows(nano.backward)
        q_bytes = shape.q_bytes + shape.o_bytes + _LSE_BYTES * shape.heads
        kept += nano.share * (q * q_bytes + once * shape.kv_bytes)
        wide = 3 * shape.q_bytes + shape.o_bytes + (q_bytes if made.resend else 0)
        keys = 3 * np.maximum(once, copied) + copied + (once if made.resend else 0)
        at_work = np.maximum(at_work, q * wide + keys * shape.kv_bytes)
    return np.asarray(((0 if made.resend else layers * kept) + at_work)[homes:].astype(np.int64))
