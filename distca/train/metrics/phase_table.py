"""Attention time by pipeline phase and rank: how level the pool's work is, warm-up and drain included.

With p stages, stage s runs the forward of micro-batch m in forward phase m + s. It runs its backward in backward phase
m + (p − 1) − s. Disaggregated, a rank serves in every phase. With attention at home (1F1B) it only serves the phases of
its own micro-batches; stages do not march in step then, and the table shows what each dependency step costs.

Measured seconds are those of the GPU's stream; on CPUs they are CPU seconds of the thread, as ranks share cores.
Rows of a table are all forward phases, then all backward phases; columns are ranks of the server pool, stage by stage.

Where plans level a phase's time, stages without a micro-batch get more attention than others, so attention
alone is not level: it is together with the non-attention seconds of busy stages that plans count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distca.plan import PlanOptions


def measured_phases(
    serves: Mapping[str, Sequence[float]], stage: int, options: PlanOptions, micro_batches: int
) -> np.ndarray | None:
    """This rank's measured seconds in every phase.

    Args:
        serves: seconds of every attention call of the step, by direction, in the order they ran.
        stage: this rank's.
        options: how steps are planned.
        micro_batches: of the step.

    Returns:
        [2 · phases] seconds; None where the calls cannot be told apart by phase.
    """
    phases = micro_batches + options.stages - 1
    busy = phases if options.disaggregate else micro_batches
    forward, backward = (np.asarray(serves[direction], np.float64) for direction in ("forward", "backward"))
    again = not options.disaggregate and len(forward) == 2 * len(backward)  # whole layers are computed again
    if not len(backward) or len(backward) % busy or not len(forward) or len(forward) % (busy * (1 + again)):
        return None
    by_forward = forward.reshape(busy * (1 + again), -1).sum(axis=1)
    by_backward = backward.reshape(busy, -1).sum(axis=1)
    if again:
        is_again = _computed_again(stage, options.stages, micro_batches)
        by_forward, by_backward = by_forward[~is_again], by_backward + by_forward[is_again]
    columns = np.zeros((2, phases))
    first = (0, 0) if options.disaggregate else (stage, options.stages - 1 - stage)
    for column, at, seconds in zip(columns, first, (by_forward, by_backward), strict=True):
        column[at : at + busy] = seconds
    return columns.reshape(-1)


def _computed_again(stage: int, stages: int, micro_batches: int) -> np.ndarray:
    """Returns a bool for each forward pass of a stage, in the order of 1F1B: whether backward computes it again."""
    ahead = min(stages - 1 - stage, micro_batches)
    return np.array([False] * ahead + [False, True] * (micro_batches - ahead) + [True] * ahead)


class PhaseTable:
    """Sums over steps of planned and measured attention by phase and rank.

    Attributes:
        measured: [2 · phases, ranks] seconds of all layers of a stage.
        at_home: [2 · phases, ranks] planned seconds of the same layers with documents computed at home; None where
            nothing was planned by phase (attention at home).
        planned: [2 · phases, ranks] the same as planned.
        other: [2 · phases, ranks] planned non-attention seconds; 0 where attention alone is leveled.
        by_kind: [kinds, 2 · phases, ranks] the planned seconds of each kind of layer, which add up to ``planned``.
        kinds: their names.
        steps: how many steps were added up.
    """

    def __init__(self, kinds: Sequence[str] = ()) -> None:
        self.kinds = tuple(kinds)
        self.by_kind: np.ndarray | None = None
        self.measured: np.ndarray | None = None
        self.at_home: np.ndarray | None = None
        self.planned: np.ndarray | None = None
        self.other: np.ndarray | None = None
        self.steps = 0

    def add(
        self,
        measured: np.ndarray,
        at_home: np.ndarray | None,
        planned: np.ndarray | None,
        other: np.ndarray | None = None,
        by_kind: np.ndarray | None = None,
    ) -> None:
        """Add a step. The first one, which compiles and warms up, is forgotten as soon as there is another."""
        if self.steps == 1 or self.measured is None:
            self.measured, self.at_home, self.planned, self.other = measured.copy(), at_home, planned, other
            self.by_kind = by_kind
        else:
            self.measured += measured
            self.at_home, self.planned = _sum(self.at_home, at_home), _sum(self.planned, planned)
            self.other, self.by_kind = _sum(self.other, other), _sum(self.by_kind, by_kind)
        self.steps += 1

    def levels(self, name: str) -> dict[str, Any]:
        """How level a series is, and as ``with_linear`` how level with non-attention seconds."""
        table = getattr(self, name)
        alone = levels(table)
        if self.other is None or not self.other.any():
            return alone
        return alone | {"with_linear": levels(table + self.other)}

    def planned_by_kind(self) -> dict[str, np.ndarray]:
        """[2 · phases, ranks] planned seconds by name of the kind of layer, where there are several."""
        if self.by_kind is None or len(self.kinds) < 2:
            return {}
        return dict(zip(self.kinds, self.by_kind, strict=True))

    def write(self, path: Path, stages: int, servers: int = 0) -> None:
        """Write the table as JSON: mean seconds per step, and how level each is. The last columns are of so many
        ``servers`` without a model."""
        assert self.measured is not None
        counted = max(self.steps - 1, 1)
        report: dict[str, Any] = {
            "stages": stages,
            "ranks_per_stage": (self.measured.shape[1] - servers) // stages,
            **({"servers_without_a_model": servers} if servers else {}),
            "steps": counted,
            "rows": "all forward phases, then all backward phases",
            "columns": "ranks of the server pool, stage by stage" + ", then servers without a model" * bool(servers),
        }
        for name in ("measured", "planned", "at_home"):
            table = getattr(self, name)
            if table is not None:
                report[name] = {"seconds": (table / counted).tolist()} | self.levels(name)
        of_kinds = {name: {"seconds": (each / counted).tolist()} for name, each in self.planned_by_kind().items()}
        report |= {"planned_by_kind": of_kinds} if of_kinds else {}
        if self.other is not None and self.other.any():
            report["other"] = {"seconds": (self.other / counted).tolist()}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _sum(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    return None if one is None or other is None else one + other


def levels(table: np.ndarray) -> dict[str, Any]:
    """How level a [2 · phases, ranks] table is.

    Returns:
        by_phase: slowest rank over the mean, of every phase.
        phases: the same over the step, where every phase lasts as long as its slowest rank.
        ranks: slowest rank over the mean, of each rank's sum over all phases.
    """
    means, sums = table.mean(axis=1), table.sum(axis=0)
    by_phase = np.divide(table.max(axis=1), means, out=np.ones_like(means), where=means > 0)
    return {
        "by_phase": by_phase.tolist(),
        "phases": float(table.max(axis=1).sum() / means.sum()) if means.sum() > 0 else 1.0,
        "ranks": float(sums.max() / sums.mean()) if sums.mean() > 0 else 1.0,
    }
