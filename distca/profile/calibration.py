"""Two corrections of a table's measured points: smoothing over neighbours, and load factors from mixed batches.

Load factors are what points miss of batches as servers run them. Points are short batches of equal tasks, timed between
others that leave the GPU at a higher clock. A server's batch mixes lengths and follows others as heavy. Array legend: B
batches, L lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.plan import CostModel
from distca.plan.cost.table import LoadFactors

LENGTHS = np.array([2048.0, 8192.0, 32768.0, 131072.0])
"""k,v rows at which factors are fitted."""
_ONE_FOR_ALL = 0.35
"""The noise of one batch, about 1.5 %, divided by the usual difference of neighbouring lengths' factors, about 4 %."""

Tasks = tuple[np.ndarray, np.ndarray]
"""[N] query rows and [N] k,v rows of a batch."""


def load_factors(cost: CostModel, batches: Sequence[Tasks], forward: np.ndarray, backward: np.ndarray) -> LoadFactors:
    """Factors that fit measured batches best.

    Least squares of measured over predicted seconds, in which factors of neighbouring lengths are held together: with
    few batches, or batches that are all alike, about one factor for all lengths is left.

    Args:
        cost: the table without load factors.
        batches: [B] the tasks of each batch.
        forward: [B] seconds measured.
        backward: [B] seconds measured.
    """
    together = _ONE_FOR_ALL * np.diff(np.eye(len(LENGTHS)), axis=0)
    found = []
    for of_task, measured in ((cost.forward, forward), (cost.backward, backward)):
        seconds = [of_task(q_rows, kv_rows) for q_rows, kv_rows in batches]
        shares = np.stack([each @ _near(kv) / each.sum() for each, (_, kv) in zip(seconds, batches, strict=True)])
        wanted = np.append(measured / np.array([each.sum() for each in seconds]), np.zeros(len(together)))
        found.append(np.linalg.lstsq(np.vstack((shares, together)), wanted, rcond=None)[0])
    return LoadFactors(LENGTHS, found[0], found[1])


def _near(kv_rows: np.ndarray) -> np.ndarray:
    """[N, L] how much each length's factor counts for a task, as LoadFactors.at interpolates."""
    return np.stack([np.interp(np.log2(kv_rows), np.log2(LENGTHS), one) for one in np.eye(len(LENGTHS))], axis=1)


def smoothed(
    seconds: np.ndarray, base: np.ndarray, q_rows: np.ndarray, kv_rows: np.ndarray, octaves: float, least: int
) -> np.ndarray:
    """Smooth measured over modelled seconds, in the logarithms of rows and seconds.

    Each point gets the value of a plane, fitted to its neighbours with Gaussian weights. Whole documents (q = kv) and
    shards are smoothed by themselves: unfilled tiles make the former dearer.

    Args:
        seconds: [Q, V] measured, nan where not.
        base: [Q, V] modelled, whose shape in q and kv is kept.
        q_rows: [Q] rows of the axis.
        kv_rows: [V] rows of the axis.
        octaves: standard deviation of the weights, in powers of two of rows; 0 changes nothing.
        least: points with fewer query rows stay as they are: half-filled tiles jump from one to the next.

    Returns:
        [Q, V] seconds, nan where nothing was measured.
    """
    result = np.array(seconds, np.float64)
    if not octaves:
        return result
    log_q, log_kv = (grid.ravel() for grid in np.meshgrid(np.log2(q_rows), np.log2(kv_rows), indexing="ij"))
    value = np.log(result / base).ravel()
    usable = ~np.isnan(value) & (log_q >= np.log2(least))
    for whole in (True, False):
        group = np.flatnonzero(usable & ((log_q == log_kv) == whole))
        at = np.stack((np.ones(len(group)), log_q[group], log_kv[group]), axis=1)
        for number in group:
            # Seen from the point itself, the plane's constant is its value there.
            apart = at - [0.0, log_q[number], log_kv[number]]
            weight = np.exp(-(apart[:, 1:] ** 2).sum(axis=1) / (4 * octaves**2))[:, None]
            plane = np.linalg.lstsq(apart * weight, value[group, None] * weight, rcond=None)[0]
            result.flat[number] = np.exp(plane[0, 0]) * base.flat[number]
    return result
