"""Less noise in a table: every point becomes what a local plane through its neighbours says.

A point is the median of a few runs whose single ones differ by 3 to 4 % on a GPU, so neighbours differ by more than the
kernel does. Array legend: Q, V points of the grid's axes.
"""

from __future__ import annotations

import numpy as np


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
