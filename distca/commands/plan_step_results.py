"""The output of ``distca plan`` for a whole step, from the file that a failed plan left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from distca.plan import Links, StepPlan, route
from distca.plan.step_file import StepInputs
from distca.words import count, format_bytes

if TYPE_CHECKING:
    from rich.table import Table


def replanned(inputs: StepInputs) -> Table:
    """A table of what the step's plan achieves, once it, and every rank's routes, could be made.

    Raises:
        PlanError: its documents cannot be laid out. What the planner itself fails with is not caught.
    """
    from rich.table import Table

    began = time.perf_counter()
    plan = inputs.plan()
    seconds, balance = time.perf_counter() - began, plan.balance()
    if inputs.options.disaggregate:
        _route_all(plan, inputs.options.links)
    options = inputs.options
    documents = count(sum(map(len, inputs.lengths)), "document")
    table = Table(title=f"a step of {documents}, {count(plan.tokens, 'token')}", show_header=True)
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = [
        ("data-parallel ranks, pipeline stages", f"{options.ranks}, {options.stages}"),
        ("micro-batches, halves of each", f"{len(plan.layouts)}, {options.nano_batches}"),
        ("imbalance of attention at home, the worst phase", _worst(balance.seconds_before)),
        ("imbalance planned, the worst phase", _worst(balance.seconds_after + balance.other_seconds)),
        ("bytes of one layer of every stage", format_bytes(balance.bytes_moved)),
        *_combination_rows(plan),
        ("planning", f"{seconds * 1e3:.1f} ms"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _combination_rows(plan: StepPlan) -> list[tuple[str, str]]:
    """A row for each combination of kinds, where the stages' layers have several."""
    names = plan.options.names_of_combinations
    if len(names) == 1:
        return []
    rows = []
    for number, name in enumerate(names):
        found = plan.of_combination(number).balance()
        worst = _worst(found.seconds_after + found.other_seconds)
        rows.append((f"{name}; at worst, and bytes", f"{worst}, {format_bytes(found.bytes_moved)}"))
    return rows


def _route_all(plan: StepPlan, links: Links) -> None:
    for _, phase in plan.phases:
        for plans in phase.by_combination:
            for each in plans:
                for rank in range(each.layout.ranks):
                    route(each, rank, links)


def _worst(seconds: np.ndarray) -> str:
    mean = seconds.mean(axis=1)
    return f"{(seconds.max(axis=1)[mean > 0] / mean[mean > 0]).max(initial=1.0):.3f}"
