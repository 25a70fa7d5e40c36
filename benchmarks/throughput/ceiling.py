"""The rates of this machine's kernels at the model's own shapes, and how long a batch would take at them alone.

Matrix products, core attention and the cores of recurrent layers are measured, each alone, back to back. The ceiling of
a global batch adds up all of its floating-point work at these rates: forward and backward of the linear and output
layers (nothing recomputed) and of cores, spread perfectly over all ranks. It has no communication, norms, convolutions
or activations, and no optimizer.

Where the linear layers compute in FP8, so do the products of the ceiling, with the quantising that they cannot be
without; the output layer stays in bfloat16.

Rates are taken in a burst and held (rates.py). Training lasts longer than a burst, so the ceiling counts with the rates
that are held; results are also given as a share of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.throughput.products import Product, products_of
from benchmarks.throughput.rates import held_and_burst
from distca.attention import Kernel, TaskBatch
from distca.baselines import Work
from distca.plan import AttentionKind, AttentionShape
from distca.plan.geometry import pairs
from distca.profile.linear_fp8 import linear_work
from distca.recurrent import CoreRows, Recurrence, RecurrentKernel, choose_recurrent_kernel
from distca.recurrent.self_check import drawn_rows
from distca.train.config.schema import RunConfig

_ROWS, _FP8_ROWS, _CPU_ROWS = 8192, 65536, 64
"""Rows of a matrix product. In FP8 a narrow one on few rows takes less time than the host needs to queue it: on 8,192
rows one of 2,048 by 2,048 took as long as one of 2,048 by 3,072."""
_CORE_ROWS = 8192  # rows of a document for recurrent cores


@dataclass(frozen=True)
class Matrix(Product):
    """One weight of one tensor-parallel rank and what multiplying by it takes.

    Attributes:
        seconds_per_token: forward and both products of backward.
    """

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
class Core:
    """The core of recurrent layers, its convolution left out, and what it takes for all heads of a rank.

    Attributes:
        kernel: that was measured.
        layers: that have it.
        forward: seconds per row.
        backward: the same for backward.
    """

    kernel: str
    layers: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Ceiling:
    """Measured rates of one kind, held or in a burst, averaged over ranks.

    Attributes:
        matrices: of all layers.
        tp: tensor-parallel ranks; what was measured is one's share.
        attention: of core attention, by window of the model's layers.
        document: tokens of the document that was measured.
        attention_flops: operations of a pair on a rank, forward; backward counts twice that.
        core: of recurrent layers, where there are some.
    """

    matrices: tuple[Matrix, ...]
    tp: int
    attention: tuple[Attention, ...]
    document: int
    attention_flops: int
    core: Core | None = None

    @property
    def work(self) -> Work:
        """The seconds that a document takes on one rank, over all layers."""
        linear = sum(matrix.layers * matrix.seconds_per_token for matrix in self.matrices)
        core = self.core.layers * (self.core.forward + self.core.backward) if self.core else 0.0
        by_window = {each.window: each.layers * (each.forward + each.backward) for each in self.attention}
        full = by_window.pop(0, 0.0)
        return Work(linear + core, full, tuple(by_window.items()))

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
            **({"recurrent": asdict(self.core)} if self.core else {}),
        }

    @staticmethod
    def of_report(content: dict[str, Any], tp: int, flops: int) -> Ceiling:
        """The ceiling that :meth:`report` gave, of a model with so many ``attention_flops``."""
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
            tp,
            tuple(attention),
            content["attention"]["document"],
            flops,
            Core(**content["recurrent"]) if "recurrent" in content else None,
        )

    def _tflops(self, of: Attention) -> dict[str, Any]:
        return {
            "window": of.window,
            "layers": of.layers,
            "forward_tflops": self.attention_flops / of.forward / 1e12,
            "backward_tflops": 2 * self.attention_flops / of.backward / 1e12,
        }


def pair_flops(shape: AttentionShape) -> int:
    """Operations of a pair of query and key on a rank, forward."""
    return 2 * shape.heads * (shape.head_dim + (shape.value_dim or shape.head_dim))


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
    products = products_of(config)
    document = min(document, 65536) if device.type == "cuda" else min(document, 256)
    took = []
    for product in products:
        size = product.width, product.out
        in_fp8 = config.train.fp8 != "none" and product.name != "output"
        rows = (_FP8_ROWS if in_fp8 else _ROWS) if device.type == "cuda" else _CPU_ROWS
        if in_fp8:
            _compile_casts(*size, device, config.train.fp8)
            held, burst = held_and_burst(linear_work(*size, rows, device, config.train.fp8), device)
        else:
            held, burst = _matrix_seconds(*size, rows, device, dtype)
        took.append((held / rows, burst / rows))
    # Those without a window first, as they are most of the work.
    windows = Counter(sorted(model.windows, key=lambda window: (window > 0, -window)))
    for window in windows:
        kind = AttentionKind(model.softmax_scale, window)
        took += _attention_seconds(shape, kernel, document, device, dtype, kind)
    kernel_of_cores = None
    if model.recurrent_layers:
        what = model.hybrid.recurrence(model.recurrent_layers[0], tp)
        kernel_of_cores = choose_recurrent_kernel(what, device, dtype)
        took += _core_seconds(what, kernel_of_cores, document, device, dtype)
    everyone = torch.tensor(took, dtype=torch.float64)
    dist.all_reduce(everyone)
    pairs_of = [float(pairs(np.array([document]), np.array([document]), window)[0]) for window in windows]

    def ceiling(seconds: list[float]) -> Ceiling:
        parts = iter(seconds)
        matrices = [Matrix(**asdict(product), seconds_per_token=next(parts)) for product in products]
        attention = [
            Attention(window, layers, next(parts) / count, next(parts) / count)
            for (window, layers), count in zip(windows.items(), pairs_of, strict=True)
        ]
        core = None
        if kernel_of_cores is not None:
            core = Core(kernel_of_cores.name, len(model.recurrent_layers), next(parts), next(parts))
        return Ceiling(tuple(matrices), tp, tuple(attention), document, pair_flops(shape), core)

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

    return held_and_burst(work, device)


def _attention_seconds(
    shape: AttentionShape, kernel: Kernel, document: int, device: torch.device, dtype: torch.dtype, kind: AttentionKind
) -> list[tuple[float, float]]:
    """Seconds of forward and of backward of one document, each held and in a burst."""
    borders = np.array([0, document])
    batch, values = TaskBatch.of(borders, borders, device), shape.value_dim or shape.head_dim
    q, do, k, v = (
        torch.randn(document, heads, width, device=device, dtype=dtype)
        for heads in (shape.heads, shape.kv_heads)
        for width in (shape.head_dim, values)
    )
    o, lse = kernel.forward(q, k, v, batch, kind)
    return [
        held_and_burst(lambda: kernel.forward(q, k, v, batch, kind), device),
        held_and_burst(lambda: kernel.backward(do, q, k, v, o, lse, batch, kind), device),
    ]


def _core_seconds(
    what: Recurrence, kernel: RecurrentKernel, count: int, device: torch.device, dtype: torch.dtype
) -> list[tuple[float, float]]:
    """Seconds of a row, forward and backward, each held and in a burst; of about ``count`` rows of documents that are
    short enough to keep a GPU busy side by side."""
    rows, do = drawn_rows(what, min(count, _CORE_ROWS), dtype, device, 0)
    documents = max(count // len(do), 1)
    spans = [(number * len(do), (number + 1) * len(do)) for number in range(documents)]
    rows = CoreRows(*(torch.cat([each] * documents) for each in rows.all))
    do = torch.cat([do] * documents)
    o, gradients = torch.empty_like(do), rows.zeros_like()
    works: tuple[Callable[[], object], ...] = (
        lambda: kernel.forward(rows, spans, None, o, False),
        lambda: kernel.backward(rows, spans, None, do, None, gradients, False),
    )
    both = [held_and_burst(work, device) for work in works]
    return [(held / len(do), burst / len(do)) for held, burst in both]
