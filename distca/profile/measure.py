"""Everything `distca profile` measures on one device, as the content of one table file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from distca.attention import Kernel
from distca.device.host_memory import keep_freed_memory
from distca.plan import AttentionKind, AttentionShape
from distca.profile.grid import Grid, grid_for, points
from distca.profile.kernels import Measured, measure_points, smooth_points, table_of
from distca.profile.linear import measure_linear
from distca.profile.linear_fp8 import measure_fp8
from distca.profile.timing import EndedEarlyError, TimedServer, route_of_tasks
from distca.profile.validation import calibrated, random_batch, time_mixed, validation_of
from distca.runtime.device_routes import ServerRoute

Progress = Callable[[str, int], Callable[[], None]]
"""Begins a part of the work with a name and a number of steps; what it returns is called after each step. Both may
raise EndedEarlyError."""
Route = Callable[[np.ndarray, np.ndarray], ServerRoute]
"""Makes a server's route for tasks of so many query and key rows."""


@contextmanager
def _as_a_rank() -> Iterator[None]:
    """CPU ranks compute with one thread each, as torchrun starts them, and keep their memory."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_as_a_rank()
def measure_device(
    kernel: Kernel,
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    hidden: int,
    ffn: int,
    scalings: Sequence[str] = (),
    window: int = 0,
    progress: Progress,
) -> dict[str, Any]:
    """Measure the kernel over the device's grid, mixed batches, and linear layers.

    Load factors are fitted to some of the mixed batches, and the others check the predictions. Linear layers are also
    measured in FP8 with each of ``scalings`` ("current", "delayed", "blockwise"). For layers with a ``window`` fewer
    batches are measured, and no linear layers: these are in the table of layers without.

    Returns:
        What ``load_table`` reads (see docs/profiling.md), with ``validation`` and ``linear``; arrays are numpy.
        ``lacks`` names parts that were not reached before ``progress`` ended the measurement.

    Raises:
        EndedEarlyError: ``progress`` ended it before the kernel was measured once at every point.
    """
    began = time.perf_counter()
    on_gpu = device.type == "cuda"
    grid = replace(grid_for(device, shape), window=window)
    if window:
        grid = replace(grid, sample_s=grid.sample_s / 2, mixed_rounds=3)
    wanted = points(grid, shape)
    route = partial(route_of_tasks, kind=AttentionKind(shape.head_dim**-0.5, window), device=device)
    server = TimedServer(kernel, shape, device, dtype, q_rows=grid.most_q_rows, kv_rows=grid.most_kv_rows)
    advance = progress(f"{kernel.name} kernel", sum(point.rounds for point in wanted))
    measured = measure_points(server, route, grid, wanted, shape, advance)
    smooth = smooth_points(grid, measured, shape)
    lacks = [
        "mixed batches",
        *(["linear layers"] if not window else []),
        *(["linear layers in FP8"] if scalings else []),
    ]
    found: dict[str, Any] = {"lacks": lacks, "validation": None, "linear": None}
    with suppress(EndedEarlyError):  # what was measured before is kept
        found |= _mixed_batches(server, route, grid, shape, smooth, on_gpu, progress)
        lacks.remove("mixed batches")
        del server
        if not window:
            advance = progress("linear layers", 1)
            tokens = 8192 if on_gpu else 64
            found["linear"] = measure_linear(shape, hidden, ffn, tokens=tokens, device=device, dtype=dtype)
            lacks.remove("linear layers")
            advance()
        if scalings and not window:
            advance = progress("linear layers in FP8", 1)
            found["linear"]["fp8"] = measure_fp8(shape, hidden, ffn, device=device, scalings=scalings)
            lacks.remove("linear layers in FP8")
            advance()
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "kernel": kernel.name,
        "dtype": str(dtype).removeprefix("torch."),
        "value_bytes": dtype.itemsize,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        **({"value_dim": shape.value_dim} if shape.value_dim else {}),
        "block": grid.tile,
        **({"window": window} if window else {}),
        "q_rows": list(grid.q_rows),
        "kv_rows": list(grid.kv_rows),
        "forward_seconds": smooth.forward,
        "backward_seconds": smooth.backward,
        "measured": {"forward_seconds": measured.forward, "backward_seconds": measured.backward},
        "noise": measured.noise,
        **found,
        "measured_in_s": round(time.perf_counter() - began, 1),
    }


def _mixed_batches(
    server: TimedServer,
    route: Route,
    grid: Grid,
    shape: AttentionShape,
    smooth: Measured,
    on_gpu: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Measures mixed batches; returns the load factors that some give, and how others agree with them."""
    fitted, held_out, seconds = (24, 10, 25e-3) if on_gpu else (8, 4, 0.25)
    if grid.window:
        fitted, held_out = fitted // 2, held_out // 2
    cost = table_of(shape, grid, smooth)
    drawn = [random_batch(grid, cost, seconds, seed) for seed in range(fitted + held_out)]
    advance = progress("mixed batches", len(drawn) * grid.mixed_rounds)
    mixed = time_mixed(server, route, grid, drawn, advance)
    load = calibrated(cost, mixed[:fitted])
    return {
        "load_factors": {"kv_rows": load.kv_rows, "forward": load.forward, "backward": load.backward},
        "validation": validation_of(table_of(shape, grid, smooth, load), mixed[fitted:]),
    }
