"""``distca simulate``: what a training step would take on a cluster that nobody has to have. No GPU, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distca.baselines import BaselineError
from distca.commands.options import check_least, check_most, check_tolerance, check_writable
from distca.commands.plan import check_picture, read_data, read_lengths
from distca.data.mixes import MIX_NAMES, sample_mix
from distca.errors import OptionError
from distca.plan import CostModel, analytic_cost
from distca.plan.cost.table_file import find_table, open_table
from distca.simulate import MODELS, Cluster, Job, Model, Workload, load_rates
from distca.simulate.job import Recompute
from distca.simulate.kernel_rate import at_rate
from distca.simulate.sweep import BEST, BEST_HIDDEN, Outcome, parse, run_mode

if TYPE_CHECKING:
    from rich.table import Table

_MOST_TOKENS = 1 << 32
_WIDTH = 104  # columns of a terminal that the table needs
_Counts = int | list[int]


def simulate(
    lengths: str,
    gpus: _Counts = 64,
    *,
    model: str = "8b",
    modes: str = f"distca,{BEST},{BEST_HIDDEN}",
    context: _Counts = 131_072,
    tp: int = 8,
    pp: int = 1,
    tokens_per_rank: int = 131_072,
    micro_batches: int | None = None,
    recompute: Recompute = "none",
    gpus_per_node: int = 8,
    nvlink_gb_s: float = 370.0,
    network_gb_s: float = 50.0,
    nvlink_latency_us: float = 15.0,
    network_latency_us: float = 30.0,
    memory_gib: float = 139.8,
    cost_table: str | None = None,
    rates: str | None = None,
    attention_tflops: float | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    steps: int = 1,
    output: str | None = None,
    picture: str | None = None,
    timeline: str | None = None,
    timeline_rank: int = 0,
) -> None:
    """Predict training steps on a cluster, for DistCA and the ways to train that it is compared with.

    Args:
        lengths: a file with one document length per line; a mix: pretrain, prolong, pretrain-long or prolong-long; or
            training data as text:PATH, jsonl:PATH, parquet:PATH, arrow:PATH, blend:PATH (a byte is a token) or
            indexed:PATH, cut where it exceeds a context.
        gpus: of the cluster; several as [64,128,256].
        model: 8b, 34b, or a configuration file with a model (YAML).
        modes: comma-separated: distca, packed, packed-dealt, variable, cpN, cpN-keep, ringN, ulyssesN for groups of N
            ranks, each with -hidden behind it if what it sends is to travel beside computation; best-cp and
            best-cp-hidden take the fastest degree. With stages all but distca run 1F1B.
        context: longest document; longer ones of a mix are cut, of a long-context mix stretched to it; several as
            [131072,524288].
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        tokens_per_rank: tokens of a micro-batch on a data-parallel rank.
        micro_batches: of a step; by default 1, with stages 4 for each.
        recompute: what backward computes again: none, mlp or all.
        gpus_per_node: GPUs that share NVLink.
        nvlink_gb_s: GB/s of a GPU inside a node, each way.
        network_gb_s: GB/s of a GPU between nodes, each way.
        nvlink_latency_us: microseconds until the first byte inside a node.
        network_latency_us: the same between nodes.
        memory_gib: GiB of a GPU.
        cost_table: a measured cost table for the heads of a tensor-parallel rank; by default that of the H200.
        rates: a file of what else a GPU takes; by default that of the H200.
        attention_tflops: rate of a long document's attention forward; everything is scaled to it.
        tolerance: of plans; by default what training takes.
        seed: of the documents.
        steps: global batches to predict, one after the other.
        output: file for all figures (JSON).
        picture: file for speed over GPUs, such as speed.png.
        timeline: file for the first step of the first case's first mode, for Perfetto (JSON).
        timeline_rank: the server that it shows.
    """
    from rich.console import Console
    from rich.progress import track

    all_gpus, contexts = _several("gpus", gpus), _several("context", context)
    check_least(1, steps=steps, tokens_per_rank=tokens_per_rank, gpus=min(all_gpus), context=min(contexts))
    check_least(1, tp=tp, pp=pp, micro_batches=micro_batches)
    check_least(0, seed=seed, timeline_rank=timeline_rank)
    check_most(1 << 20, gpus=max(all_gpus), steps=steps)
    for option, path in (("output", output), ("timeline", timeline)):
        if path:
            check_writable(option, path)
    if picture:
        check_picture(picture)
    if tolerance is not None:
        check_tolerance(tolerance)
    names = list(dict.fromkeys(name.strip() for name in modes.split(",") if name.strip()))
    if not names:
        raise OptionError(f"--modes is {modes!r}, which names none; give some, such as distca,{BEST}.")
    for name in names:
        parse(name)
    shape = read_model(model)
    per_step = micro_batches or (1 if pp == 1 else 4 * pp)
    jobs = {}
    for count in all_gpus:
        cluster = Cluster(
            count, gpus_per_node, nvlink_gb_s, network_gb_s, nvlink_latency_us, network_latency_us, memory_gib
        )
        jobs[count] = Job(
            shape,
            cluster,
            _cost(shape, tp, cost_table, attention_tflops),
            tp=tp,
            pp=pp,
            tokens_per_rank=tokens_per_rank,
            micro_batches=per_step,
            recompute=recompute,
            tolerance=tolerance,
            rates=load_rates(rates) if rates else load_rates(),
        )
        if timeline and timeline_rank >= jobs[count].servers:
            raise OptionError(
                f"--timeline_rank is {timeline_rank}; the pool has servers 0 to {jobs[count].servers - 1}."
            )
    cases = [(count, longest, name) for count in all_gpus for longest in contexts for name in names]
    drawn: dict[tuple[int, int], list[Workload]] = {}
    found: list[dict[str, Any]] = []
    console, spans_kept = Console(), False
    console.width = max(console.width, _WIDTH)
    for count, longest, name in track(cases, description="Simulating", console=Console(stderr=True), transient=True):
        job = jobs[count]
        if (count, longest) not in drawn:
            drawn[count, longest] = draw(lengths, job, longest, seed, steps)
        watched = () if spans_kept or not timeline else (timeline_rank,)
        try:
            outcome = run_mode(job, name, drawn[count, longest], watched)
        except BaselineError as error:
            found.append({"gpus": count, "context": longest, "mode": name, "refused": str(error)})
            continue
        if timeline and not spans_kept:
            spans_kept = True
            _write_timeline(outcome, timeline)
        found.append({"gpus": count, "context": longest, **outcome.figures()})
    console.print(summary(found, memory_gib))
    for row in found:
        if "refused" in row:
            console.print(f"{row['mode']} on {row['gpus']} GPUs is left out: {row['refused']}", highlight=False)
    if output:
        Path(output).write_text(json.dumps({"lengths": lengths, "cases": found}, indent=1) + "\n", encoding="utf-8")
    if picture:
        draw_speeds(found, picture)
    for what, path in (("Figures", output), ("Picture", picture), ("Timeline", timeline)):
        if path:
            console.print(f"{what} written to {path}.", highlight=False)


def read_model(name: str) -> Model:
    """A shape by name, or that of a configuration file.

    Raises:
        OptionError: there is no such name or file, or it has no model.
    """
    if name in MODELS:
        return MODELS[name]
    import yaml

    wanted = ("layers", "hidden", "ffn", "heads", "kv_heads")
    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))["model"]
        sizes = {key: int(content[key]) for key in wanted}
        head_dim = int(content.get("head_dim") or sizes["hidden"] // sizes["heads"])
        return Model(**sizes, head_dim=head_dim, vocabulary=int(content.get("vocabulary") or 128_256))
    except OSError:
        raise OptionError(
            f"--model is {name!r}; give {', '.join(MODELS)} or a configuration file, such as configs/llama-8b.yaml."
        ) from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        raise OptionError(f"--model {name} has no model with {', '.join(wanted)}; give another file.") from None


def _cost(shape: Model, tp: int, cost_table: str | None, tflops: float | None) -> CostModel:
    part = shape.shape(tp)
    heads = (part.heads, part.kv_heads, part.head_dim)
    cost: CostModel | None
    if cost_table:
        cost = open_table(cost_table, *heads)
    else:
        cost = find_table("NVIDIA H200", "flash4", *heads) or analytic_cost(*heads)
    return cost if tflops is None else at_rate(cost, tflops)


def draw(lengths: str, job: Job, context: int, seed: int, steps: int) -> list[Workload]:
    """The documents of every step.

    Raises:
        OptionError: more tokens than a simulation takes, or documents that do not fit.
        PlanError, MixError: on lengths that cannot be read or drawn.
    """
    tokens = 2 * steps * job.micro_batches * job.data_parallel * job.tokens_per_rank
    if tokens > _MOST_TOKENS:
        raise OptionError(
            f"{steps} steps of {job.micro_batches} micro-batches on {job.data_parallel} ranks draw {tokens:,} tokens, "
            f"which is more than {_MOST_TOKENS:,}; lower --steps, --micro_batches or --tokens_per_rank."
        )
    documents = read_data(lengths, longest=context, seed=seed)
    if lengths in MIX_NAMES:
        documents = sample_mix(lengths, tokens, seed, context=context)
    elif documents is None:
        documents = read_lengths(lengths, tokens=tokens, seed=seed)
    common = (context, job.data_parallel, job.tokens_per_rank, job.micro_batches, seed)
    return [Workload.draw(documents, *common, skip=step) for step in range(steps)]


def summary(found: list[dict[str, Any]], memory_gib: float) -> Table:
    """A table of all cases; what does not fit into ``memory_gib`` is marked."""
    from rich.table import Table

    table = Table(title="Predicted steps; memory above that of a GPU is marked *")
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
        axes.legend(title="context")
    figure.savefig(path, dpi=120)


def _write_timeline(outcome: Outcome, path: str) -> None:
    from distca.train.metrics.plots import write_timeline

    write_timeline(
        path,
        [
            {
                "rank": span.rank,
                "track": span.track,
                "name": span.name,
                "start_us": span.start * 1e6,
                "duration_us": span.seconds * 1e6,
            }
            for span in outcome.spans
        ],
    )


def _several(option: str, value: _Counts) -> list[int]:
    """Each once; OptionError where there is none."""
    if value == []:
        raise OptionError(f"--{option} is []; give one number, or several as [64,128].")
    return list(dict.fromkeys(value)) if isinstance(value, list) else [value]


def _tokens(context: int) -> str:
    return f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
