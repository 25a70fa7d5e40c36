"""From the ranks' records to figures, a JSON file and a table."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.throughput.batches import Batches, lengths_of
from benchmarks.throughput.ceiling import Ceiling
from benchmarks.throughput.cut_short import Figures, batches_of, tokens_per_s
from benchmarks.throughput.record import RankRecord
from benchmarks.throughput.settings import Settings
from benchmarks.throughput.table import table
from distca.baselines import parse_mode
from distca.plan import imbalance
from distca.train.metrics.flops import ModelFlops, mfu, model_flops, peak_seconds

LOSS_TOLERANCE = 1e-3
"""Largest relative distance of a mode's losses from the first mode's."""
GRADIENT_TOLERANCE = 1e-2
"""The same of gradient norms, in which a wrong backward shows long before it shows in losses."""

_SUMMARIES = ("states", "dstates")
"""Transfers of recurrent layers, without the rows that their convolutions read before a piece."""


def figures(
    records: list[RankRecord], batches: Batches, settings: Settings, ceiling: Ceiling, burst: Ceiling
) -> Figures:
    """Figures of one mode over the batches that it has measured; GPUs' idle shares and clocks come with its end."""
    # Ranks leave a step together but for the last synchronisation; the slowest one counts.
    seconds = np.max([record.seconds for record in records], axis=0)
    measured = [lengths_of(batch) for batch in batches.global_batches[settings.warm_up :][: len(seconds)]]
    tokens = [int(lengths.sum()) for lengths in measured]
    config, ranks = settings.config, len(records)
    flops = model_flops(config.model, config.model.vocabulary, np.concatenate(measured))
    best, best_in_burst = (sum(each.step_seconds(x, ranks) for x in measured) for each in (ceiling, burst))
    rows = np.array([record.rows for record in records])
    idle = _idle(records, seconds, settings.traced)
    return {
        "batches": len(measured),
        "tokens": tokens,
        "step_s": _spread(seconds),
        "steps_s": seconds.tolist(),
        "tokens_per_s": sum(tokens) / float(seconds.sum()),
        "mfu": mfu(_at_peak(flops, settings), float(seconds.sum()), ranks),
        "share_of_ceiling": best / float(seconds.sum()),
        "share_of_burst_ceiling": best_in_burst / float(seconds.sum()),
        "idle_share": _mean(idle),
        "idle_shares": idle,
        "traced": [asdict(record.traced) if record.traced else None for record in records],
        **_attention(records, seconds),
        **_exposed(records, seconds),
        "memory_gib": _memory([record.memory_gib for record in records if record.memory_gib is not None]),
        **{key: _largest(records, key) for key in ("reserved_gib", "predicted_gib", "outside_torch_gib")},
        "recompute": records[0].recompute,
        "offload": records[0].offload,
        "backward": records[0].backward,
        "keep_outputs": records[0].keep_outputs,
        "rows_max_over_mean": float((rows.max(axis=0) / np.maximum(rows.mean(axis=0), 1)).mean()),
        "bytes_per_step": statistics.fmean(records[0].bytes_moved),
        "exchanges_not_by_nvshmem": records[0].fallback_exchanges,
        "plan_ms": statistics.fmean(records[0].plan_ms),
        "plan_wait_ms": {"mean": statistics.fmean(records[0].wait_ms), "max": max(records[0].wait_ms)},
        **_kernel_planning(records, seconds),
        "gpus": records[0].gpus,
        "losses": records[0].loss,
        "gradient_norms": records[0].grad_norm,
    }


def _attention(records: list[RankRecord], seconds: np.ndarray) -> dict[str, Any]:
    """Figures of core attention, where its time is known."""
    attention = np.array([record.attention_s for record in records])
    if not attention.size:
        return {"attention_max_over_mean": None, "attention_by_rank": None, "attention_share": None}
    return {
        "attention_max_over_mean": _spread(np.array([imbalance(step) for step in attention.T])),
        "attention_by_rank": {
            "measured_s": attention.tolist(),
            "planned_s_per_layer": [record.planned_s for record in records],
        },
        "attention_share": float(attention.mean(axis=0).sum() / seconds.sum()),
    }


def _exposed(records: list[RankRecord], seconds: np.ndarray) -> dict[str, Any]:
    """The shares of steps in which compute waited for each transfer and for summaries alone, on the rank that waited
    most. That contains waits for ranks that send later, and putting rows in their places."""
    waits = [sum(map(Counter, record.exposed_s), Counter[str]()) for record in records]
    total = float(seconds.sum())
    names = sorted(set().union(*waits))
    summaries = max(sum(each[what] for what in _SUMMARIES) for each in waits) / total
    return {
        "exposed": {what: max(each[what] for each in waits) / total for what in names},
        "summaries_exposed": summaries if {*_SUMMARIES} & {*names} else None,
    }


def _kernel_planning(records: list[RankRecord], seconds: np.ndarray) -> dict[str, Any]:
    """Figures of a peer: by batch, the most seconds that a rank's library planned attention, and the step without
    them."""
    planning = np.array([record.kernel_planning_s for record in records])
    if not planning.size:
        return {}
    longest = planning.max(axis=0)
    without = seconds - np.minimum(longest, seconds)
    return {
        "kernel_planning_s": longest.tolist(),
        "step_s_without_kernel_planning": {"median": float(np.median(without)), "mean": float(without.mean())},
    }


def _idle(records: list[RankRecord], seconds: np.ndarray, traced: int) -> list[float] | None:
    """The part, by rank, of a step in which it does not compute; see busy.py."""
    busy_s = [record.traced.busy_s for record in records if record.traced is not None]
    if len(busy_s) == len(records):
        return [1 - each / float(seconds[:traced].sum()) for each in busy_s]
    if torch.cuda.is_available():
        return None
    busy = np.array([record.cpu_s for record in records]) / seconds
    shares: list[float] = (1 - np.minimum(busy, 1)).mean(axis=1).tolist()
    return shares


def _memory(ranks: list[float]) -> dict[str, Any] | None:
    """Peaks by rank, and their extremes; None on CPUs, where no peak is known."""
    if not ranks:
        return None
    return {"max": max(ranks), "min": min(ranks), "max_over_min": max(ranks) / min(ranks), "ranks": ranks}


def _largest(records: list[RankRecord], key: str) -> float | None:
    return max((value for record in records if (value := getattr(record, key)) is not None), default=None)


def _mean(values: list[float] | None) -> float | None:
    return None if values is None else statistics.fmean(values)


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "stdev": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        "min": float(values.min()),
        "max": float(values.max()),
    }


def _at_peak(flops: ModelFlops, settings: Settings) -> float | None:
    name, train = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", settings.config.train
    return peak_seconds(flops, name, train.precision, train.fp8)


def compare(modes: dict[str, Figures]) -> dict[str, Any]:
    """DistCA against packed documents, variable-length packing and the best of the others; distances of losses.

    Where a time limit ended a mode, speeds are over the batches that DistCA has; modes with fewer are left out.
    """
    losses, gradients = _apart(modes, "losses"), _apart(modes, "gradient_norms")
    result: dict[str, Any] = {
        "loss_difference": losses,
        "gradient_norm_difference": gradients,
        # "not <=" so that a loss that is no number counts as apart.
        "apart": [
            name for name in modes if not (losses[name] <= LOSS_TOLERANCE and gradients[name] <= GRADIENT_TOLERANCE)
        ],
    }
    if "distca" not in modes:
        return result
    count = batches_of(modes["distca"])
    rates = {name: tokens_per_s(mode, count) for name, mode in modes.items() if batches_of(mode) >= count}
    ours = rates["distca"]
    # Variable-length packing buys its speed with memory, and no sampler deals a step's documents as packed-dealt has
    # them: both are compared with by themselves.
    others = {name: rate for name, rate in rates.items() if name not in ("packed-dealt", "variable")}
    parsed = {name: parse_mode(name) for name in others}
    others = {name: others[name] for name, mode in parsed.items() if not (mode.peer or mode.disaggregated)}
    if others:
        best = max(others, key=lambda name: others[name])
        result |= {"ideal_baseline": best, "over_ideal_baseline": ours / others[best]}
    result |= {f"over_{name}": ours / rates[name] for name in ("packed", "packed-dealt", "variable") if name in rates}
    return result | {"batches": count, "over": {name: _over(modes["distca"], modes[name]) for name in rates}}


def _over(ours: Figures, other: Figures) -> dict[str, float]:
    """How many times as fast DistCA's steps are as another mode's of the same batches: median and mean of ratios."""
    count = batches_of(ours)
    ratios = np.array(other["steps_s"][:count]) / np.array(ours["steps_s"][:count])
    return {"median": float(np.median(ratios)), "mean": float(ratios.mean())}


def _apart(modes: dict[str, Figures], key: str) -> dict[str, float]:
    """Largest relative distance of each mode's figures from the first mode's, over the batches that both have."""
    first = next(iter(modes.values()))[key]
    return {name: _distance(mode[key], first) for name, mode in modes.items()}


def _distance(values: list[float], others: list[float]) -> float:
    count = min(len(values), len(others))
    # numpy's maximum of numbers and no number is no number.
    return float(np.max(np.abs(np.subtract(values[:count], others[:count])) / np.abs(others[:count])))


def write(folder: Path, report: dict[str, Any]) -> None:
    """Write benchmark.json and table.md; called while and after every mode, so that a run that is cut short keeps what
    it has."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_whole(folder / "benchmark.json", json.dumps(report, indent=1) + "\n")
    _write_whole(folder / "table.md", table(report))


def _write_whole(path: Path, text: str) -> None:
    """Beside the file and then over it: a run that ends meanwhile leaves the file as it was."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
