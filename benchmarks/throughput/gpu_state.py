"""Clocks and power of this machine's GPUs while something runs, read by nvidia-smi twice a second."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from typing import IO, Any

import numpy as np

_FIELDS = ("index", "clocks.sm", "power.draw", "temperature.gpu")
_BUSY = 0.7


class GpuState:
    """Watches from entering to leaving; without nvidia-smi it knows nothing and says so by empty summaries."""

    def __enter__(self) -> GpuState:
        self._log: IO[str] = tempfile.TemporaryFile("w+")
        self._watcher = None
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", "-lms", "500"]
            self._watcher = subprocess.Popen(query, stdout=self._log, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watcher is not None:
            self._watcher.terminate()
            self._watcher.wait()

    def summaries(self, gpus: int) -> list[dict[str, Any]]:
        """Per GPU the 10th, 50th and 90th percentile of each reading, while it drew most of its highest power."""
        self._log.seek(0)
        return [_summary(rows) for rows in _readings(self._log.read(), _visible(gpus))]


def _visible(gpus: int) -> list[int]:
    """nvidia-smi's numbers of the GPUs that this process sees: it counts all of the machine."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [int(each) for each in named] if all(map(str.isdigit, named)) else list(range(gpus))


def _readings(log: str, gpus: list[int]) -> list[np.ndarray]:
    """[readings, fields] of every GPU; lines that are cut off or say "N/A" are left out."""
    rows: dict[int, list[list[float]]] = {each: [] for each in gpus}
    for line in log.splitlines():
        try:
            index, *values = (float(value) for value in line.split(","))
        except ValueError:
            continue
        if len(values) == len(_FIELDS) - 1 and index in rows:
            rows[int(index)].append(values)
    return [np.array(each).reshape(-1, len(_FIELDS) - 1) for each in rows.values()]


def _summary(readings: np.ndarray) -> dict[str, Any]:
    if not len(readings):
        return {}
    power = readings[:, 1]
    busy = readings[power >= _BUSY * power.max()]
    names = ("sm_clock_mhz", "power_w", "temperature_c")
    return {name: np.percentile(busy[:, at], (10, 50, 90)).tolist() for at, name in enumerate(names)}
