"""What this machine's kernels can do at the model's own shapes, and how long a batch would take if they did only that.

Matrix products and core attention are measured, each alone, back to back. The ceiling of a global batch adds up all of
its floating-point work at these rates: forward and backward of the linear and output layers (nothing recomputed) and of
core attention, spread perfectly over all ranks, with no communication, no norms or activations and no optimizer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.baselines import Work
from distca.attention import Kernel, TaskBatch
from distca.plan import AttentionShape
from distca.profile.served import median_seconds
from distca.runtime.clock import Clock
from distca.train.settings import RunConfig

_REPEATS = 10


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
class Ceiling:
    """Measured rates, averaged over ranks.

    Attributes:
        matrices: of one layer, and last the output layer.
        layers: of the model.
        tp: tensor-parallel ranks; what was measured is one's share.
        pair_forward: seconds of core attention per pair of query and key, all heads of a rank.
        pair_backward: the same for backward.
        document: tokens of the document that was measured.
        attention_flops: operations of a pair on a rank, forward; backward counts twice that.
    """

    matrices: tuple[Matrix, ...]
    layers: int
    tp: int
    pair_forward: float
    pair_backward: float
    document: int
    attention_flops: int

    @property
    def work(self) -> Work:
        """What a document takes on one rank, over all layers."""
        *layer, output = (matrix.seconds_per_token for matrix in self.matrices)
        return Work(self.layers * sum(layer) + output, self.layers * (self.pair_forward + self.pair_backward))

    def step_seconds(self, lengths: np.ndarray, ranks: int) -> float:
        """The ceiling of a global batch with these document lengths on ``ranks`` ranks of all kinds."""
        return float(self.work.seconds(lengths).sum()) * self.tp / ranks

    def report(self) -> dict[str, Any]:
        """For the result file; rates in TFLOP/s of one rank."""
        return {
            "matrices": [asdict(matrix) | {"tflops": matrix.tflops} for matrix in self.matrices],
            "attention": {
                "document": self.document,
                "forward_tflops": self.attention_flops / self.pair_forward / 1e12,
                "backward_tflops": 2 * self.attention_flops / self.pair_backward / 1e12,
                "backward_counts": "2 x forward, as MFU does; the kernel's own recomputation is not counted",
            },
        }


def measure_ceiling(
    config: RunConfig, shape: AttentionShape, kernel: Kernel, device: torch.device, document: int
) -> Ceiling:
    """Measure on all ranks at once, as training runs; every rank calls it and gets the mean.

    Args:
        config: the model and its parallelism.
        shape: attention heads of one tensor-parallel rank.
        kernel: core attention's.
        device: of this rank.
        document: tokens of the document for core attention.
    """
    model, tp = config.model, config.parallel.tp
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    heads = shape.heads * shape.head_dim
    sizes = {
        "qkv": (model.hidden, heads + 2 * shape.kv_heads * shape.head_dim),
        "proj": (heads, model.hidden),
        "fc1": (model.hidden, 2 * model.ffn // tp),
        "fc2": (model.ffn // tp, model.hidden),
        "output": (model.hidden, model.vocabulary // tp),
    }
    tokens = 8192 if device.type == "cuda" else 64
    document = min(document, 65536) if device.type == "cuda" else min(document, 256)
    took = [_matrix_seconds(*size, tokens, device, dtype) / tokens for size in sizes.values()]
    forward, backward = _attention_seconds(shape, kernel, document, device, dtype)
    everyone = torch.tensor([*took, forward, backward], dtype=torch.float64)
    dist.all_reduce(everyone)
    *took, forward, backward = (everyone / dist.get_world_size()).tolist()
    pairs = document * (document + 1) / 2
    return Ceiling(
        tuple(Matrix(name, *size, seconds) for (name, size), seconds in zip(sizes.items(), took, strict=True)),
        model.layers,
        tp,
        forward / pairs,
        backward / pairs,
        document,
        4 * heads,
    )


def _matrix_seconds(width: int, out: int, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of forward and backward of one weight on ``tokens`` rows."""
    x, weight, gradient = (
        torch.randn(rows, columns, device=device, dtype=dtype)
        for rows, columns in ((tokens, width), (out, width), (tokens, out))
    )

    def work() -> None:
        _ = x @ weight.t()
        _ = gradient @ weight
        _ = gradient.t() @ x

    return _sustained(work, device)


def _attention_seconds(
    shape: AttentionShape, kernel: Kernel, document: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds of forward and of backward of one document."""
    borders = np.array([0, document])
    batch, scale = TaskBatch.of(borders, borders, device), shape.head_dim**-0.5
    q, do = (torch.randn(document, shape.heads, shape.head_dim, device=device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(document, shape.kv_heads, shape.head_dim, device=device, dtype=dtype) for _ in range(2))
    o, lse = kernel.forward(q, k, v, batch, scale)
    return (
        _sustained(lambda: kernel.forward(q, k, v, batch, scale), device),
        _sustained(lambda: kernel.backward(do, q, k, v, o, lse, batch, scale), device),
    )


def _sustained(work: Any, device: torch.device) -> float:
    clock = Clock(device)
    for _ in range(3 if clock.on_gpu else 1):
        work()
    return median_seconds(work, clock, _REPEATS if clock.on_gpu else 2)
