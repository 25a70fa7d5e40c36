"""What this machine's kernels can do at the model's own shapes, and how long a batch would take if they did only that.

Matrix products and core attention are measured, each alone, back to back. The ceiling of a global batch adds up all of
its floating-point work at these rates: forward and backward of the linear and output layers (nothing recomputed) and of
core attention, spread perfectly over all ranks, with no communication, no norms or activations and no optimizer.

Where the linear layers compute in FP8, so do the products of the ceiling, with the quantising that they cannot be
without; the output layer stays in bfloat16.

Rates are taken twice. In a burst, some tens of milliseconds after a pause, a GPU runs at clocks that its power limit
does not let it hold: an H200's matrix products then are up to 20 % faster than a second later. Training lasts longer
than a burst, so the ceiling counts with the rates that are held; results are also given as a share of the other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.attention import Kernel, TaskBatch
from distca.baselines import Work
from distca.device.clock import Clock
from distca.plan import AttentionKind, AttentionShape
from distca.plan.geometry import pairs
from distca.profile.linear_fp8 import linear_work
from distca.profile.timing import median_seconds
from distca.train.config.schema import RunConfig

_ROWS, _FP8_ROWS, _CPU_ROWS = 8192, 65536, 64
"""Rows of a matrix product. In FP8 a narrow one on few rows takes less time than the host needs to queue it: on 8,192
rows one of 2,048 by 2,048 took as long as one of 2,048 by 3,072."""
_BURST = 10  # repetitions
_PAUSE_S, _WARM_S, _HELD_S = 0.3, 0.4, 1.0


@dataclass(frozen=True)
class Matrix:
    """One weight of one tensor-parallel rank and what multiplying by it takes.

    Attributes:
        name: which.
        width: its columns, the layer's input.
        out: its rows.
        seconds_per_token: forward and both products of backward.
    """

    name: str
    width: int
    out: int
    seconds_per_token: float

    @property
    def tflops(self) -> float:
        """Measured rate, forward and backward together."""
        return 6 * self.width * self.out / self.seconds_per_token / 1e12


@dataclass(frozen=True)
class Attention:
    """Core attention of layers with one window, and what it takes for all heads of a rank.

    Attributes:
        window: keys that a query sees; 0 for all.
        layers: that have it.
        forward: seconds per pair of query and key.
        backward: the same for backward.
    """

    window: int
    layers: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Ceiling:
    """Measured rates of one kind, held or in a burst, averaged over ranks.

    Attributes:
        matrices: of one layer, and last the output layer.
        layers: of the model.
        tp: tensor-parallel ranks; what was measured is one's share.
        attention: of core attention, by window of the model's layers.
        document: tokens of the document that was measured.
        attention_flops: operations of a pair on a rank, forward; backward counts twice that.
    """

    matrices: tuple[Matrix, ...]
    layers: int
    tp: int
    attention: tuple[Attention, ...]
    document: int
    attention_flops: int

    @property
    def work(self) -> Work:
        """What a document takes on one rank, over all layers."""
        *layer, output = (matrix.seconds_per_token for matrix in self.matrices)
        by_window = {each.window: each.layers * (each.forward + each.backward) for each in self.attention}
        full = by_window.pop(0, 0.0)
        return Work(self.layers * sum(layer) + output, full, tuple(by_window.items()))

    def step_seconds(self, lengths: np.ndarray, ranks: int) -> float:
        """The ceiling of a global batch with these document lengths on ``ranks`` ranks of all kinds."""
        return float(self.work.seconds(lengths).sum()) * self.tp / ranks

    def report(self) -> dict[str, Any]:
        """For the result file; rates in TFLOP/s of one rank."""
        return {
            "matrices": [asdict(matrix) | {"tflops": matrix.tflops} for matrix in self.matrices],
            "attention": {
                "document": self.document,
                **self._tflops(self.attention[0]),
                "backward_counts": "2 x forward, as MFU does; the kernel's own recomputation is not counted",
            },
            "attention_of_others": [self._tflops(each) for each in self.attention[1:]],
        }

    @staticmethod
    def of_report(content: dict[str, Any], layers: int, tp: int, heads: int) -> Ceiling:
        """The ceiling that :meth:`report` gave, of a model with so many layers and ``heads`` columns of a rank's q."""
        flops = 4 * heads
        matrices = [{key: value for key, value in each.items() if key != "tflops"} for each in content["matrices"]]
        attention = [
            Attention(
                each["window"],
                each["layers"],
                flops / (each["forward_tflops"] * 1e12),
                2 * flops / (each["backward_tflops"] * 1e12),
            )
            for each in (content["attention"], *content["attention_of_others"])
        ]
        return Ceiling(
            tuple(Matrix(**each) for each in matrices),
            layers,
            tp,
            tuple(attention),
            content["attention"]["document"],
            flops,
        )

    def _tflops(self, of: Attention) -> dict[str, Any]:
        return {
            "window": of.window,
            "layers": of.layers,
            "forward_tflops": self.attention_flops / of.forward / 1e12,
            "backward_tflops": 2 * self.attention_flops / of.backward / 1e12,
        }


def measure_ceiling(
    config: RunConfig, shape: AttentionShape, kernel: Kernel, device: torch.device, document: int
) -> tuple[Ceiling, Ceiling]:
    """Measure on all ranks at once, as training runs; every rank calls it and gets the mean.

    Args:
        config: the model and its parallelism.
        shape: attention heads of one tensor-parallel rank.
        kernel: core attention's.
        device: of this rank.
        document: tokens of the document for core attention.

    Returns:
        At rates that are held, and at those of a burst.
    """
    model, tp = config.model, config.parallel.tp
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    heads = shape.heads * shape.head_dim
    # Experts that a token goes to count as one product as wide as all of them, which none of their own can beat.
    ffn = model.mlp_weights // (3 * model.hidden) if model.experts.count else model.ffn
    sizes = {
        "qkv": (model.hidden, heads + 2 * shape.kv_heads * shape.head_dim),
        "proj": (heads, model.hidden),
        "fc1": (model.hidden, 2 * ffn // tp),
        "fc2": (ffn // tp, model.hidden),
        "output": (model.hidden, model.vocabulary // tp),
    }
    document = min(document, 65536) if device.type == "cuda" else min(document, 256)
    took = []
    for name, size in sizes.items():
        in_fp8 = config.train.fp8 != "none" and name != "output"
        rows = (_FP8_ROWS if in_fp8 else _ROWS) if device.type == "cuda" else _CPU_ROWS
        if in_fp8:
            _compile_casts(*size, device, config.train.fp8)
            held, burst = _held_and_burst(linear_work(*size, rows, device, config.train.fp8), device)
        else:
            held, burst = _matrix_seconds(*size, rows, device, dtype)
        took.append((held / rows, burst / rows))
    # Those without a window first, as they are most of the work.
    windows = Counter(sorted(model.windows, key=lambda window: (window > 0, -window)))
    for window in windows:
        took += _attention_seconds(shape, kernel, document, device, dtype, window)
    everyone = torch.tensor(took, dtype=torch.float64)
    dist.all_reduce(everyone)
    pairs_of = [float(pairs(np.array([document]), np.array([document]), window)[0]) for window in windows]

    def ceiling(seconds: list[float]) -> Ceiling:
        matrices = zip(sizes.items(), seconds[: len(sizes)], strict=True)
        of_kinds = zip(windows.items(), pairs_of, seconds[len(sizes) :: 2], seconds[len(sizes) + 1 :: 2], strict=True)
        return Ceiling(
            tuple(Matrix(name, *size, per_token) for (name, size), per_token in matrices),
            model.layers,
            tp,
            tuple(Attention(*each, forward / count, backward / count) for each, count, forward, backward in of_kinds),
            document,
            4 * heads,
        )

    held, burst = (everyone / dist.get_world_size()).T.tolist()
    return ceiling(held), ceiling(burst)


def _compile_casts(width: int, out: int, device: torch.device, scaling: str) -> None:
    """Transformer Engine compiles its casts to FP8 when rows of a multiple first come up, which no measured batch is to
    wait for."""
    for multiple in (32, 64, 128, 256):
        linear_work(width, out, _FP8_ROWS + multiple, device, scaling)()


def _matrix_seconds(width: int, out: int, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of forward and backward of one weight on ``tokens`` rows, held and in a burst."""
    x, weight, gradient = (
        torch.randn(rows, columns, device=device, dtype=dtype)
        for rows, columns in ((tokens, width), (out, width), (tokens, out))
    )

    def work() -> None:
        _ = x @ weight.t()
        _ = gradient @ weight
        _ = gradient.t() @ x

    return _held_and_burst(work, device)


def _attention_seconds(
    shape: AttentionShape, kernel: Kernel, document: int, device: torch.device, dtype: torch.dtype, window: int
) -> list[tuple[float, float]]:
    """Seconds of forward and of backward of one document, each held and in a burst."""
    borders = np.array([0, document])
    batch, kind = TaskBatch.of(borders, borders, device), AttentionKind(shape.head_dim**-0.5, window)
    q, do = (torch.randn(document, shape.heads, shape.head_dim, device=device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(document, shape.kv_heads, shape.head_dim, device=device, dtype=dtype) for _ in range(2))
    o, lse = kernel.forward(q, k, v, batch, kind)
    return [
        _held_and_burst(lambda: kernel.forward(q, k, v, batch, kind), device),
        _held_and_burst(lambda: kernel.backward(do, q, k, v, o, lse, batch, kind), device),
    ]


def _held_and_burst(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Mean seconds of ``work`` over a second that follows on others like it, and median of the first ones after a
    pause. Ranks begin together, as GPUs of a machine may share what power there is."""
    clock = Clock(device)
    if not clock.on_gpu:
        work()
        seconds = median_seconds(work, clock, 2)
        return seconds, seconds
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    time.sleep(_PAUSE_S)
    dist.barrier()
    burst = median_seconds(work, clock, _BURST)
    _mean_seconds(work, clock, _WARM_S, burst)
    return _mean_seconds(work, clock, _HELD_S, burst), burst


def _mean_seconds(work: Callable[[], object], clock: Clock, total: float, each: float) -> float:
    """Mean over about ``total`` seconds of work that takes about ``each``."""
    repeats = max(round(total / each), 1)
    start = clock.now()
    for _ in range(repeats):
        work()
    return clock.seconds(start, clock.now()) / repeats
