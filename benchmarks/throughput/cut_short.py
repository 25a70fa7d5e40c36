"""Modes that a time limit ended: how far they came, and speeds over the batches that they have."""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]


def batches_of(made: Figures) -> int:
    """How many measured batches a mode's figures are over; older reports have no "batches" of a mode."""
    return len(made["steps_s"])


def cut_short(made: Figures, batches: int) -> str:
    """The mark of a mode that has fewer than the run's measured batches; nothing for a complete one."""
    count = batches_of(made)
    return f"{count} of {batches} batches" if count < batches else ""


def tokens_per_s(made: Figures, count: int) -> float:
    """A mode's speed over its first ``count`` batches."""
    if count == batches_of(made):
        speed: float = made["tokens_per_s"]
        return speed
    return float(sum(made["tokens"][:count]) / sum(made["steps_s"][:count]))
