"""A cost model that interpolates measured seconds of attention tasks; ``distca profile`` measures them.

A *task* is the query range [kv_rows - q_rows, kv_rows) of a document, with all keys before kv_rows. A table has the
seconds of tasks for some values of ``q_rows`` and ``kv_rows``. A table is for one GPU model, one kernel, and one
number and size of heads. :class:`TableCost` interpolates the table once, onto a finer grid.

Q measured values of ``q_rows``, V measured values of ``kv_rows``, K directions (forward, backward), N tasks, C grid
cells. Load factors (:class:`LoadFactors`) are given for L values of ``kv_rows``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.errors import PlanError
from distca.plan.cost.analytic import analytic_cost
from distca.plan.cost.linear import LinearRate
from distca.plan.cost.model import AttentionShape, CostModel, Direction
from distca.plan.geometry import causal_pairs

_STEPS = 8
"""The number of grid steps between a power of two and the next power. Example: there are lines at 8, 9, 10, ..., 16
rows. A measured point between two lines gets slightly other seconds than measured."""
_FEW = 8
"""Up to this many tasks without a window are computed in plain Python, others in numpy. Eight take 12 µs
in Python and 19 µs in numpy, as measured on a CPU."""
_LINES_PER_BIT = _STEPS / 2.0**52
"""Grid lines per unit of a float64 that is viewed as int64. From a power of two to the next power, this integer grows
by 2^52, and the number of the grid line by ``_STEPS``."""


@dataclass(frozen=True)
class LoadFactors:
    """Factors on a table's seconds. A table is measured on batches of equal tasks; real batches have unequal tasks.

    Between two values of ``kv_rows`` a factor is linear in log2 of ``kv_rows``; outside all values it is constant.

    Attributes:
        kv_rows: [L] increasing.
        forward, backward: [L] factors above 0 on the seconds of forward and of backward.

    Raises:
        PlanError: ``kv_rows`` do not increase or are below 1, a factor is not above 0, or the arrays differ in length.
    """

    kv_rows: np.ndarray
    forward: np.ndarray
    backward: np.ndarray

    def __post_init__(self) -> None:
        _check_axis("kv_rows of load_factors", self.kv_rows)
        for name in ("forward", "backward"):
            factors = getattr(self, name)
            if factors.shape != self.kv_rows.shape or not (np.isfinite(factors) & (factors > 0)).all():
                raise PlanError(
                    f"The cost table's load_factors need one positive {name} factor for each of the "
                    f"{len(self.kv_rows)} kv_rows, not {factors.tolist()}."
                )

    @staticmethod
    def of(content: Mapping[str, Any]) -> LoadFactors | None:
        """Returns the factors in the content of a table's file; None if there are none."""
        found = content.get("load_factors")
        if found is None:
            return None
        return LoadFactors(*(np.asarray(found[key], np.float64) for key in ("kv_rows", "forward", "backward")))

    def at(self, kv_rows: np.ndarray) -> np.ndarray:
        """Returns [K, N] factors at [N] ``kv_rows``."""
        at, lengths = np.log2(kv_rows), np.log2(self.kv_rows)
        return np.stack([np.interp(at, lengths, factors) for factors in (self.forward, self.backward)])


class TableCost(CostModel):
    """Seconds of tasks, interpolated between measured points.

    A task's seconds are a *factor* times the seconds by the formula of ``analytic.py``:

    - At a measured point, the factor is measured seconds over the formula's seconds.
    - At a corner of a grid cell, the factor is interpolated between measured points, bilinearly in log2 of ``q_rows``
      and ``kv_rows``. Outside the measured points the factor is constant.
    - Inside a grid cell, the factor is interpolated between corners, bilinearly in ``q_rows`` and ``kv_rows``.

    Args:
        shape: the heads that the seconds are for.
        q_rows: [Q] query rows, increasing.
        kv_rows: [V] k,v rows, increasing.
        forward_seconds: [Q, V] seconds per task in a large batch of equal tasks; nan if not measured.
        backward_seconds: [Q, V] the same in backward.
        block: query rows of one kernel tile.
        load: factors on interpolated seconds; None for no factors.
        linear: seconds of matrix products on this GPU; None if they were not measured.
        window: the number of keys that a query sees in the measured layers; 0 without a limit.

    Raises:
        PlanError: ``q_rows`` or ``kv_rows`` do not increase or are below 1; or seconds are not above 0, shapes do not
            fit, or some ``kv_rows`` have no measured point.

    Attributes:
        measured: the four arrays that were given, under the names in :attr:`COLUMNS`.
    """

    COLUMNS = ("q_rows", "kv_rows", "forward_seconds", "backward_seconds")
    """The names of the measured arrays in a table's file."""

    def __init__(
        self,
        shape: AttentionShape,
        q_rows: np.ndarray,
        kv_rows: np.ndarray,
        forward_seconds: np.ndarray,
        backward_seconds: np.ndarray,
        block: int = 128,
        load: LoadFactors | None = None,
        linear: LinearRate | None = None,
        window: int = 0,
    ) -> None:
        self.shape = shape
        self.window = window
        self.block = block
        self.linear = linear
        self.load = load
        self.measured = dict(zip(self.COLUMNS, (q_rows, kv_rows, forward_seconds, backward_seconds), strict=True))
        heads = shape.heads, shape.kv_heads, shape.head_dim
        base = analytic_cost(*heads, value_bytes=shape.value_bytes, block=block, value_dim=shape.value_dim)
        self._base = replace(base, window=window)
        q_axis, kv_axis = np.asarray(q_rows, np.float64), np.asarray(kv_rows, np.float64)
        for name, axis in (("q_rows", q_axis), ("kv_rows", kv_axis)):
            _check_axis(name, axis)
        points = np.meshgrid(q_axis, kv_axis, indexing="ij")
        factors = np.stack(
            (
                _factors("forward", forward_seconds, self._base.forward(*points)),
                _factors("backward", backward_seconds, self._base.backward(*points)),
            )
        )
        # corners [K, q lines, kv lines]: the factor at each corner of a grid cell.
        self._q, self._kv = _Lines.over(q_axis), _Lines.over(kv_axis)
        corners = _interpolated(factors, q_axis, kv_axis, self._q.rows, self._kv.rows)
        if load is not None:
            corners = corners * load.at(self._kv.rows)[:, None]
        self._least_factor = corners.min(axis=(1, 2))
        # These arrays are [2, 1], for q_rows and kv_rows. A float64 stores its exponent e as e + 1023, so "_first_line"
        # is the first line's number plus _STEPS · 1023.
        lines = (self._q, self._kv)
        self._first_line = np.array([[_STEPS * 1023.0 + x.first] for x in lines])
        self._cell_count = np.array([[float(x.cells)] for x in lines])
        self._last_cell = np.array([[x.cells - 1] for x in lines])
        cells = _cells(corners)
        self._cells = {"both": cells, "forward": cells[:, :1], "backward": cells[:, 1:]}
        terms = [self._base.forward_terms, self._base.backward_terms]
        few = [list(zip(*cells[:, k].tolist(), strict=True)) for k in range(2)]
        self._few = {"both": (terms, few), "forward": (terms[:1], few[:1]), "backward": (terms[1:], few[1:])}

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("forward", q_rows, kv_rows)[0]

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("backward", q_rows, kv_rows)[0]

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        if q_rows.ndim == 1 and len(q_rows) <= _FEW and not self.window:
            return np.array(self.of_few(direction, q_rows.tolist(), kv_rows.tolist()))
        # at [2, N]: q_rows and kv_rows of each task, counted in grid lines from the first line. The whole part is the
        # cell's index, and the fraction is dq for q_rows and dkv for kv_rows. The factor is
        # constant + by_q · dq + by_kv · dkv + by_both · dq · dkv.
        seconds = self._base.per_direction(direction, q_rows, kv_rows)
        at = np.array((q_rows, kv_rows), np.float64).reshape(2, -1)
        at = np.multiply(at.view(np.int64), _LINES_PER_BIT)
        at -= self._first_line
        np.minimum(np.maximum(at, 0.0, out=at), self._cell_count, out=at)
        cell = np.minimum(at.astype(np.int64), self._last_cell)
        at -= cell
        dq, dkv = at
        parts = self._cells[direction].take(cell[0] * self._kv.cells + cell[1], axis=2)
        constant, by_q, by_kv, by_both = parts
        by_both *= dq
        by_both += by_kv
        by_both *= dkv
        by_q *= dq
        by_both += by_q
        by_both += constant
        seconds *= by_both.reshape(seconds.shape)
        return seconds

    def of_few(self, direction: Direction, q_rows: Sequence[float], kv_rows: Sequence[float]) -> list[list[float]]:
        if self.window:
            return super().of_few(direction, q_rows, kv_rows)
        terms, cells = self._few[direction]
        seconds = [[0.0] * len(q_rows) for _ in terms]
        for n, (q, kv) in enumerate(zip(q_rows, kv_rows, strict=True)):
            if not q:
                continue
            row, dq = self._q.place(q)
            column, dkv = self._kv.place(kv)
            pairs, cell = causal_pairs(q, kv), row * self._kv.cells + column
            for k, (by_pair, by_row, by_key) in enumerate(terms):
                constant, by_q, by_kv, by_both = cells[k][cell]
                factor = (by_both * dq + by_kv) * dkv + by_q * dq + constant
                seconds[k][n] = (by_pair * pairs + by_row * q + by_key * kv) * factor
        return seconds

    def least(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """Returns [K, N] lower bounds: seconds by the formula, times the smallest factor of all corners."""
        both = self._least_factor
        factor = {"forward": both[:1], "backward": both[1:]}.get(direction, both)
        return self._base.per_direction(direction, q_rows, kv_rows) * factor[:, None]


class _Lines:
    """The lines of the fine grid along one axis.

    Line number _STEPS · e + i, with i from 0 to _STEPS - 1, is at 2^e · (1 + i / _STEPS) rows. Example with 8 steps:
    line 24 is at 8 rows and line 25 at 9 rows. A float64 stores the number of rows as e and i / _STEPS.

    Attributes:
        first: number of the first line.
        cells: number of cells between the first line and the last.
    """

    def __init__(self, first: int, cells: int) -> None:
        self.first, self.cells = first, cells

    @staticmethod
    def over(axis: np.ndarray) -> _Lines:
        """Returns the fewest lines, but at least two, that enclose all values of ``axis``."""
        low, high = (_number(axis[[0, -1]])).tolist()
        first = int(np.floor(low))
        return _Lines(first, max(int(np.ceil(high)) - first, 1))

    @property
    def rows(self) -> np.ndarray:
        line = self.first + np.arange(self.cells + 1)
        return np.exp2(line // _STEPS) * (1 + line % _STEPS / _STEPS)

    def place(self, rows: float) -> tuple[int, float]:
        """Returns the index of the cell with ``rows``, and the place of ``rows`` in this cell, from 0 to 1.

        Rows outside the grid count as those of the nearest line."""
        # frexp gives rows = fraction · 2^exponent, where fraction is at least 1/2. So e is exponent - 1, and i / _STEPS
        # is 2 · fraction - 1.
        fraction, exponent = math.frexp(rows)
        at = (exponent - 2 + 2 * fraction) * _STEPS - self.first
        if at <= 0.0:
            return 0, 0.0
        cell = int(at)
        return (cell, at - cell) if cell < self.cells else (self.cells - 1, 1.0)


def _check_axis(name: str, axis: np.ndarray) -> None:
    if axis.ndim != 1 or not len(axis) or not np.isfinite(axis).all() or axis[0] < 1 or (np.diff(axis) <= 0).any():
        raise PlanError(f"The cost table's {name} must be increasing numbers of at least 1, not {axis.tolist()}.")


def _number(rows: np.ndarray) -> np.ndarray:
    """Returns [N] line numbers of [N] float64 ``rows``. Example with 8 steps: 8.5 rows are at line 24.5."""
    return rows.view(np.int64) * _LINES_PER_BIT - _STEPS * 1023.0


def _interpolated(
    factors: np.ndarray, q_axis: np.ndarray, kv_axis: np.ndarray, q_rows: np.ndarray, kv_rows: np.ndarray
) -> np.ndarray:
    """Returns [K, len(q_rows), len(kv_rows)] factors, from the ``factors`` [K, Q, V] at ``q_axis`` and ``kv_axis``.

    Interpolation is bilinear in log2 of rows, and constant outside the axes."""
    q, dq = _cell(np.log2(q_axis), q_rows)
    kv, dkv = _cell(np.log2(kv_axis), kv_rows)
    q1, kv1 = np.minimum(q + 1, len(q_axis) - 1), np.minimum(kv + 1, len(kv_axis) - 1)
    by_q = factors[:, q] * (1 - dq)[:, None] + factors[:, q1] * dq[:, None]
    return np.asarray(by_q[:, :, kv] * (1 - dkv) + by_q[:, :, kv1] * dkv)


def _cell(axis: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index of the ``axis`` interval that contains log2(``rows``), and the place in the interval, 0 to 1.

    Rows outside the axis count as its nearest end. Example: for the axis [1, 2, 3], 6 rows have log2 2.58, index 1 and
    place 0.58."""
    at = np.clip(np.log2(rows), axis[0], axis[-1])
    low = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, max(len(axis) - 2, 0))
    width = axis[np.minimum(low + 1, len(axis) - 1)] - axis[low]
    return low, np.divide(at - axis[low], width, out=np.zeros_like(at), where=width > 0)


def _cells(corners: np.ndarray) -> np.ndarray:
    """Returns [4, K, C] terms of each cell's factor (:meth:`TableCost.per_direction`).

    ``corners`` [K, q lines, kv lines] are the factors at the cells' corners."""
    # Of a cell's corners, "low" has the fewest rows. "right" has more k,v rows than "low", "above" has more query rows,
    # and "corner" has more of both.
    low, right = corners[:, :-1, :-1], corners[:, :-1, 1:]
    above, corner = corners[:, 1:, :-1], corners[:, 1:, 1:]
    return np.stack((low, above - low, right - low, corner - above - right + low)).reshape(4, len(corners), -1)


def _factors(name: str, seconds: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Returns [Q, V] measured ``seconds`` over the formula's seconds ``base``.

    A point that was not measured takes the factor of a measured point with equal ``kv_rows``: the one with the nearest
    index of ``q_rows``."""
    table = np.asarray(seconds, np.float64)
    if table.shape != base.shape:
        raise PlanError(
            f"The cost table's {name} seconds have shape {table.shape}; its q_rows and kv_rows need {base.shape}."
        )
    if np.isnan(table).all(axis=0).any() or (table <= 0).any() or np.isinf(table).any():
        raise PlanError(
            f"The cost table's {name} seconds must be positive and finite, with a measured value for every kv_rows."
        )
    factor = table / base
    for column in factor.T:
        known = np.flatnonzero(~np.isnan(column))
        nearest = np.abs(np.arange(len(column))[:, None] - known[None]).argmin(axis=1)
        column[:] = column[known[nearest]]
    return factor
