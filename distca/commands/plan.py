"""``distca plan``: what disaggregation would do to a batch, from document lengths alone. No GPU, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distca.commands.options import check_least, check_most, check_tolerance, check_writable
from distca.data.corpus import Corpus
from distca.data.lengths import DATA_KINDS, open_lengths
from distca.data.mixes import MIX_NAMES, sample_mix
from distca.data.sampler import Sampler
from distca.errors import OptionError, PlanError, system_words
from distca.plan import (
    CostModel,
    Links,
    MicroBatchPlan,
    Traffic,
    analytic_cost,
    imbalance,
    load_table,
    makespan_bound,
    plan_micro_batch,
    traffic,
    training_tolerance,
)
from distca.words import count, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

MOST_TOKENS = 1 << 32
"""Tokens of the largest micro-batch that is planned: a million for each of 4096 ranks."""
_MOST = 1 << 20
"""No number of ranks, heads or the like comes near; numpy's integers hold what follows from it."""


def plan(
    lengths: str,
    ranks: int = 8,
    *,
    tokens_per_rank: int = 131_072,
    seed: int = 0,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    layers: int = 1,
    nano_batches: int = 1,
    resend: bool = False,
    tolerance: float | None = None,
    ranks_per_node: int = 0,
    cost_table: str | None = None,
    picture: str | None = None,
) -> None:
    """Plan one micro-batch and show the balance before and after, the bytes that travel and the memory they take.

    Args:
        lengths: a file with one document length per line; a mix: pretrain, prolong, pretrain-long or prolong-long; or
            training data as text:PATH, jsonl:PATH, parquet:PATH, arrow:PATH, blend:PATH (a byte is a token) or
            indexed:PATH, whose first micro-batch is planned.
        ranks: home ranks, which are also the attention servers.
        tokens_per_rank: tokens of a mix or of training data for every rank; a file of lengths is taken as it is.
        seed: of the draw from a mix, and of the order of training data.
        heads: query heads per rank (32); a cost table has its own.
        kv_heads: key/value heads per rank (8); a cost table has its own.
        head_dim: size of a head (128); a cost table has its own.
        layers: layers to count bytes for.
        nano_batches: 1, or 2 for ping and pong.
        resend: plan the backward on its own, as pipelines need.
        tolerance: how far above the mean the slowest server may be; by default what training takes for so many.
        ranks_per_node: consecutive ranks that share NVLink; 0 when all do.
        cost_table: a measured cost table (JSON); without one the analytic H200 model is used.
        picture: file to draw who computes what for whom into, such as plan.png.
    """
    from rich.console import Console

    check_least(1, ranks=ranks, tokens_per_rank=tokens_per_rank, layers=layers)
    check_least(0, seed=seed, ranks_per_node=ranks_per_node)
    check_least(1, nano_batches=nano_batches)
    check_most(2, nano_batches=nano_batches)
    check_most(_MOST, ranks=ranks, layers=layers, ranks_per_node=ranks_per_node)
    if not Path(lengths).is_file() and ranks * tokens_per_rank > MOST_TOKENS:
        most = MOST_TOKENS // ranks
        raise OptionError(f"--tokens_per_rank is {tokens_per_rank}; with --ranks {ranks} it must be at most {most}.")
    if ranks_per_node and ranks % ranks_per_node:
        raise OptionError(
            f"--ranks is {ranks}, which nodes of --ranks_per_node {ranks_per_node} do not divide; every node needs "
            "equally many ranks."
        )
    if tolerance is None:
        tolerance = training_tolerance(ranks)
    check_tolerance(tolerance)
    if picture:
        check_picture(picture)
    cost = costs(cost_table, heads, kv_heads, head_dim)
    documents = read_data(lengths, longest=ranks * tokens_per_rank, seed=seed)
    if documents is None:
        documents = read_lengths(lengths, tokens=ranks * tokens_per_rank, seed=seed)
    else:
        documents = Sampler(documents, ranks, tokens_per_rank, micro_batches=1, seed=seed).next()[0].lengths
    made = plan_micro_batch(
        documents,
        ranks,
        cost,
        nano_batches=nano_batches,
        resend=resend,
        tolerance=tolerance,
        links=Links(ranks_per_node),
    )
    Console().print(summary(made, layers))
    if picture:
        draw(made, picture, lengths)
        Console().print(f"Picture written to {picture}.", highlight=False)


def costs(cost_table: str | None, heads: int | None, kv_heads: int | None, head_dim: int | None) -> CostModel:
    """The measured table, with the heads it was measured with, or the analytic model of the given heads.

    Raises:
        OptionError: on a table together with heads.
        PlanError: on an unusable table, or heads that do not fit together.
    """
    given = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    check_least(1, **given)
    check_most(_MOST, **given)
    named = [f"--{name}" for name, value in given.items() if value is not None]
    if cost_table is None:
        defaults = {"heads": 32, "kv_heads": 8, "head_dim": 128}
        return analytic_cost(**{name: given[name] or value for name, value in defaults.items()})
    if named:
        raise OptionError(
            f"--cost_table {cost_table} and {', '.join(named)} are both given, but a table counts for the heads that "
            "it was measured with; leave out one of them."
        )
    return load_table(cost_table)


def check_picture(path: str) -> None:
    """Refuse a picture that could not be written once everything is planned.

    Raises:
        OptionError: naming the suffixes that can be drawn, or what keeps it from being written.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    suffixes = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lower().removeprefix(".") not in suffixes:
        raise OptionError(f"--picture is {path}; its name must end in one of .{', .'.join(suffixes)}.")
    check_writable("picture", path)


def read_data(lengths: str, *, longest: int, seed: int = 0) -> np.ndarray | None:
    """[D] int64 document lengths of training data that is given as KIND:PATH, cut where they exceed ``longest``; of a
    blend those of an epoch. None where ``lengths`` is something else.

    Raises:
        DataError: it cannot be read.
        VersionError: a package that it needs is missing.
    """
    kind, _, path = lengths.partition(":")
    if kind not in DATA_KINDS or not path:
        return None
    return Corpus(open_lengths(kind, path), longest, "split", seed=seed).train.lengths


def read_lengths(lengths: str, *, tokens: int, seed: int) -> np.ndarray:
    """[D] int64 document lengths from a mix (``tokens`` of it) or a file with one length per line.

    Raises:
        PlanError: when ``lengths`` is neither a mix nor a file of text, or a line is no positive whole number, or they
            add up to more than MOST_TOKENS.
    """
    if lengths in MIX_NAMES:
        return sample_mix(lengths, tokens, seed)
    path = Path(lengths)
    if not path.is_file():
        raise PlanError(
            f"lengths is {lengths!r}: neither a file nor one of the mixes {', '.join(MIX_NAMES)}, nor training data as "
            f"KIND:PATH, where KIND is one of {', '.join(DATA_KINDS)}."
        )
    found = [_length(line, number, lengths) for number, line in enumerate(_lines(path), 1) if line.strip()]
    if not found:
        raise PlanError(f"{lengths} holds no document length; write one per line.")
    if sum(found) > MOST_TOKENS:
        raise PlanError(
            f"The lengths in {lengths} add up to {sum(found):,} tokens; a micro-batch has at most {MOST_TOKENS:,}, so "
            "leave some out."
        )
    return np.array(found, np.int64)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not UTF-8 text; give a file of text with one document length per line.") from None
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read ({system_words(error)}); make it readable or give another file."
        ) from None


def _length(line: str, number: int, lengths: str) -> int:
    text = line.strip()
    # int() itself refuses thousands of digits, which are too many anyway.
    fits = text.isdecimal() and len(text) <= 20 and 1 <= int(text) <= MOST_TOKENS
    if not fits:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise PlanError(f"Line {number} of {lengths} is {shown!r}; a line holds one length from 1 to {MOST_TOKENS}.")
    return int(text)


def summary(made: MicroBatchPlan, layers: int = 1) -> Table:
    """A table of what the plan achieves; bytes are those of ``layers`` layers, all ranks together."""
    from rich.table import Table

    documents, ranks = count(len(made.lengths), "document"), made.nano_batches[0].layout.ranks
    title = f"{documents}, {count(int(made.lengths.sum()), 'token')} on {count(ranks, 'rank')}"
    table = Table(title=title, show_header=True)
    table.add_column("what")
    table.add_column("value", justify="right")
    moved, shape, shortest = made.bytes_moved, made.cost.shape, shortest_shard(made)
    everywhere, busiest = f"all ranks, {count(layers, 'layer')}", busiest_rank(made)
    rows = [
        ("query heads, key/value heads, size of a head", f"{shape.heads}, {shape.kv_heads}, {shape.head_dim}"),
        ("slowest / mean attention time, documents in order", f"{made.imbalance_before:.3f}"),
        ("slowest / mean attention time, documents spread by work", f"{imbalance(made.seconds_at_home):.3f}"),
        ("slowest / mean attention time, planned", f"{made.imbalance_after:.3f}"),
        ("slowest / lower bound, planned", f"{float(made.seconds_after.max()) / lower_bound(made):.3f}"),
        ("slowest server, one layer, forward and backward", f"{made.seconds_after.max() * 1e3:.2f} ms"),
        (f"q to servers, {everywhere}", format_bytes(moved.q * layers)),
        (f"o back home, {everywhere}", format_bytes(moved.o * layers)),
        (f"k,v to servers, {everywhere}", format_bytes(moved.kv * layers)),
        (f"backward, {everywhere}", format_bytes(moved.backward * layers)),
        ("most received by one server, forward, one layer", format_bytes(most_received(made))),
        (
            "most sent or received by one rank, forward, one layer",
            f"{format_bytes(busiest.bytes)}, {busiest.over_mean:.1f} times the mean",
        ),
        *node_rows(made, layers),
        *half_rows(made, layers),
        ("shortest shard sent away", count(shortest, "token") if shortest else "none"),
        ("planning", f"{made.planning_ms:.1f} ms"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def lower_bound(made: MicroBatchPlan) -> float:
    """Seconds of forward and backward of one layer that no plan of these layouts can beat."""
    return sum(makespan_bound(nano.layout, made.cost, "both") for nano in made.nano_batches)


def most_received(made: MicroBatchPlan) -> int:
    """Bytes of q, k and v rows that the busiest receiver takes in for one nano-batch's forward."""
    shape = made.cost.shape
    moved = [traffic(nano.forward) for nano in made.nano_batches]
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
    both, _ = shape.moved_bytes("forward", made.resend)
    moved = np.sum(
        [
            traffic(nano.forward, made.step.options.links).busiest(shape.q_bytes, both - shape.q_bytes, shape.kv_bytes)
            for nano in made.nano_batches
        ],
        axis=0,
    )
    return Busiest(int(moved.max()), imbalance(moved))


def node_rows(made: MicroBatchPlan, layers: int) -> list[tuple[str, str]]:
    """What travels between nodes, where ranks are on several."""
    links = made.step.options.links
    nodes = links.nodes(made.nano_batches[0].layout.ranks)
    if nodes[-1] == 0:
        return []
    moved = [traffic(nano.forward, links) for nano in made.nano_batches]
    far, every = (
        sum(forward_bytes(made, rows) for rows in found) for found in ([rows.between(nodes) for rows in moved], moved)
    )
    share = f", {100 * far / every:.1f} % of all" if every else ""
    name = f"between {count(int(nodes[-1]) + 1, 'node')}, forward, {count(layers, 'layer')}"
    return [(name, format_bytes(far * layers) + share)]


def half_rows(made: MicroBatchPlan, layers: int) -> list[tuple[str, str]]:
    """What travels in ping and in pong, where a micro-batch is cut in two."""
    if len(made.nano_batches) == 1:
        return []
    halves = [format_bytes(forward_bytes(made, traffic(nano.forward)) * layers) for nano in made.nano_batches]
    return [(f"in ping and in pong, forward, {count(layers, 'layer')}", " and ".join(halves))]


def forward_bytes(made: MicroBatchPlan, rows: Traffic) -> int:
    """Bytes of rows that travel in the forward of one layer."""
    q_bytes, kv_bytes = made.cost.shape.moved_bytes("forward", made.resend)
    return rows.q_rows * q_bytes + rows.kv_rows * kv_bytes


def shortest_shard(made: MicroBatchPlan) -> int:
    """Query rows of the shortest range that is computed away from its home rank; 0 when nothing moves."""
    shortest: list[int] = []
    for nano in made.nano_batches:
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

    ranks = made.nano_batches[0].layout.ranks
    matrix = seconds_by_home(made) * 1e3
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    documents, tokens = count(len(made.lengths), "document"), count(int(made.lengths.sum()), "token")
    figure.suptitle(f"{lengths}: {documents}, {tokens} on {count(ranks, 'rank')}")
    before, after, who = figure.subplots(1, 3, width_ratios=(1, 1, 1.3))
    top = 1.05 * max(float(made.seconds_before.max()), float(made.seconds_after.max())) * 1e3
    for axes, seconds, title in (
        (before, made.seconds_before, "documents in order, at home"),
        (after, made.seconds_after, "planned"),
    ):
        axes.bar(np.arange(ranks), seconds * 1e3, width=1.0)
        axes.axhline(float(seconds.mean()) * 1e3, color="black", linewidth=0.8)
        axes.set(title=title, xlabel="rank", ylabel="attention ms, one layer, fwd + bwd", ylim=(0, top))
    image = who.imshow(np.where(matrix > 0, matrix, np.nan), origin="upper", aspect="auto", vmin=0)
    who.set(title="who computes for whom", xlabel="server", ylabel="home rank")
    figure.colorbar(image, ax=who, label="forward ms")
    figure.savefig(path, dpi=120)


def seconds_by_home(made: MicroBatchPlan) -> np.ndarray:
    """[R, R] forward seconds by home rank and server, over all nano-batches; a task that spans home ranks is split by
    its rows."""
    ranks = made.nano_batches[0].layout.ranks
    matrix = np.zeros((ranks, ranks))
    for nano in made.nano_batches:
        tasks = nano.forward.tasks
        length, reads = tasks.stop - tasks.start, nano.forward.q_reads
        seconds = made.cost.forward(length, tasks.stop)[reads.task] * reads.rows / length[reads.task]
        np.add.at(matrix, (reads.home, reads.server), seconds)
    return matrix
