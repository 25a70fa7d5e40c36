"""Means and largest values of figures over a run, without the steps themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class _Column:
    first: float
    largest: float
    total: float = 0.0
    count: int = 0


class RunningMeans:
    """Figures by name; steps may lack some.

    Attributes:
        steps: how many were added.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._columns: dict[str, _Column] = {}

    def add(self, values: Mapping[str, object]) -> None:
        """Take in a step; what is no number does not count."""
        self.steps += 1
        for key, value in values.items():
            if isinstance(value, int | float):
                column = self._columns.setdefault(key, _Column(value, value))
                column.largest = max(column.largest, value)
                column.total += value
                column.count += 1

    def largest(self, key: str) -> float | None:
        """The largest value of all steps."""
        return self._columns[key].largest if key in self._columns else None

    def mean(self, key: str, *, but_first: bool = False) -> float | None:
        """Over the steps that have it; ``but_first`` leaves out the first of them if there are others."""
        if key not in self._columns:
            return None
        column = self._columns[key]
        if but_first and column.count > 1:
            return (column.total - column.first) / (column.count - 1)
        return column.total / column.count
