"""Predicts several steps of a mode, and finds the fastest degree of context parallelism, for ``distca simulate``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.baselines import BaselineError, Mode, parse_mode
from distca.errors import SimulationError
from distca.plan import analytic_cost
from distca.simulate.job import Job
from distca.simulate.model import heads_of_rank
from distca.simulate.prediction import Prediction
from distca.simulate.simulation import simulate
from distca.simulate.streams import Span
from distca.simulate.workload import Workload

BEST, HALO, HIDDEN = "best-cp", "-halo", "-hidden"
BEST_HIDDEN = BEST + HIDDEN
_MOST_DEGREE = 64
"""The largest degree of context parallelism that is tried."""


@dataclass(frozen=True)
class Outcome:
    """The predictions of a mode.

    Attributes:
        mode: the name as the user gave it.
        chosen: the name of the mode that was simulated; for "best-cp" the fastest one.
        steps: the prediction of every step.
    """

    mode: str
    chosen: str
    steps: tuple[Prediction, ...]

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        return float(np.mean([each.step_s for each in self.steps]))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs together."""
        return sum(each.tokens for each in self.steps) / sum(each.step_s for each in self.steps)

    def mean(self, name: str) -> float:
        """Returns the mean over steps of an attribute of :class:`Prediction`."""
        return float(np.mean([getattr(each, name) for each in self.steps]))

    @property
    def memory_bytes(self) -> float:
        """The peak of memory on the fullest server."""
        return max(float(each.memory_bytes.max()) for each in self.steps)

    def figures(self) -> dict[str, Any]:
        """Returns the figures for a result file."""
        return {
            "mode": self.mode,
            "chosen": self.chosen,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "idle_share": self.mean("idle_share"),
            "exposed_share": self.mean("exposed_share"),
            "bubble_share": self.mean("bubble_share"),
            "attention_imbalance": self.mean("attention_imbalance"),
            "sent_bytes_busiest": max(float(each.sent_bytes.max()) for each in self.steps),
            "sent_bytes_mean": float(np.mean([each.sent_bytes.mean() for each in self.steps])),
            "memory_gib": self.memory_bytes / 2**30,
        }

    @property
    def spans(self) -> list[Span]:
        """The spans of the watched ranks in the first step."""
        return self.steps[0].spans


def run_mode(job: Job, name: str, workloads: Sequence[Workload], watched: Iterable[int] = ()) -> Outcome:
    """Returns the predictions of a mode's steps.

    Args:
        job: the model, the cluster and the parallelism.
        name: name of the mode, such as "distca", "packed", "variable", "cp4", "cp4-keep", "ring4", "ulysses4" or
            "megatron-te4-p2p". Megatron's modes have its layouts and exchanges, with this project's kernels.
            "best-cp" is the fastest of "packed" and the degrees of context parallelism by document, up to 64, that
            fit into memory. Two endings are possible. With "-halo" layers with a window get only the keys and values
            that they see. With "-hidden" transfers run beside computation as far as they can.
        workloads: the documents of every step.
        watched: numbers of the servers whose actions in the first step are recorded.

    Raises:
        BaselineError, PlanError: documents or ranks do not fit the mode, or no degree of "best-cp" fits into memory.
    """
    mode, halos, hidden = parse(name)
    if name.startswith(BEST):
        return _best(job, name, workloads, tuple(watched))
    steps = [
        simulate(job, mode, each, hidden=hidden, halos=halos, watched=() if number else tuple(watched))
        for number, each in enumerate(workloads)
    ]
    return Outcome(name, name, tuple(steps))


def parse(name: str) -> tuple[Mode, bool, bool]:
    """Returns the mode of a name, and whether "-halo" and "-hidden" end it. For "best-cp" it is "packed".

    Raises:
        BaselineError: there is no such mode, or "-hidden" is behind DistCA's.
    """
    hidden = name.endswith(HIDDEN)
    name = name.removesuffix(HIDDEN)
    if name in (BEST, BEST + HALO):
        return Mode("packed"), name != BEST, hidden
    mode = parse_mode(name)
    if hidden and mode.disaggregated:
        raise BaselineError(f"{name}{HIDDEN} is no mode: only baselines take {HIDDEN}; leave it out.")
    return mode, False, hidden


def _best(job: Job, name: str, workloads: Sequence[Workload], watched: tuple[int, ...]) -> Outcome:
    """Returns the predictions of the fastest degree of context parallelism that fits into memory."""
    found: list[Outcome] = []
    refused, how, room = "", name.removeprefix(BEST), job.cluster.memory_gib * 2**30
    for mode in _degrees(job.data_parallel):
        keeps = found and found[-1].chosen.startswith(f"cp{mode.degree}-keep") and found[-1].memory_bytes <= room
        if mode.method == "cp" and keeps:
            continue  # "cp" gathers again in backward, so it is slower than the "cp-keep" that was found to fit
        try:
            tried = mode.name + (how if mode.method != "packed" else how.removeprefix(HALO))
            found.append(run_mode(job, tried, workloads, watched))
        except BaselineError as error:
            refused = str(error)
    fitting = [each for each in found if each.memory_bytes <= room]
    if not fitting:
        least = min((each.memory_bytes for each in found), default=0.0) / 2**30
        raise BaselineError(
            f"No degree of context parallelism fits: {refused}"
            if not found
            else f"Every degree of context parallelism needs {least:.0f} GiB or more, and a GPU has "
            f"{job.cluster.memory_gib:g}; {_less_memory(job)}."
        )
    best = min(fitting, key=lambda each: each.step_s)
    return Outcome(name, best.chosen, best.steps)


def _less_memory(job: Job) -> str:
    """Returns in words which settings would take less memory and are possible."""
    ways = ["lower `tokens_per_rank`"]
    if job.recompute != "all":
        ways.append("choose a `recompute` that keeps less")
    most = {"tp": job.cluster.gpus_per_node, "pp": job.model.layers, "ep": job.model.experts.count}
    for name, last in most.items():
        if any(_is_possible(job, name, value) for value in range(getattr(job, name) + 1, last + 1)):
            ways.append(f"raise `{name}`")
    return " or ".join(ways)


def _is_possible(job: Job, name: str, value: int) -> bool:
    try:
        changes: dict[str, Any] = {name: value}
        if name == "tp":
            part = heads_of_rank(job.model, value)
            analytic = analytic_cost(part.heads, part.kv_heads, part.head_dim, value_dim=part.value_dim)
            changes["cost"] = replace(analytic, linear=job.cost.linear)
        replace(job, **changes)
    except SimulationError:
        return False
    return True


def _degrees(ranks: int) -> list[Mode]:
    """Returns "packed" and, for each degree, context parallelism that keeps gathered rows and that gathers again."""
    modes = [Mode("packed")]
    for degree in range(2, min(ranks, _MOST_DEGREE) + 1):
        if ranks % degree == 0:
            modes += [Mode("cp-keep", degree), Mode("cp", degree)]
    return modes
