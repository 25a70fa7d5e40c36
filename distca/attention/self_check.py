"""The check of a core-attention kernel on this machine, against the reference kernel in float64.

A new version of a library, a new GPU or an untested head dimension can make a kernel wrong without an error. So each
kernel computes a small batch of tasks, forward and backward, before it is chosen (select.py); this also compiles it. A
*task* is a range of queries with all keys up to them. Each tensor is compared as a whole, which shows a wrong factor.
It is also compared by *blocks*, 64 rows of one task and head. That shows a missing last tile, or a mask that is off by
one.

Shape suffixes: R query rows, or key/value rows; H heads.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from distca.attention.kernel import Kernel, TaskBatch
from distca.attention.reference import ReferenceKernel
from distca.plan.kinds import AttentionKind

logger = logging.getLogger(__name__)

TASKS = ((1, 1), (1, 300), (129, 129), (77, 513), (384, 640), (258, 258))
"""Query rows and key/value rows of the batch's tasks. They have length 1, odd lengths, more keys than queries, and up
to six tiles of a kernel."""

_WHOLE, _BLOCK = 1.5, 4.0
"""The largest error, relative to the norm, of a tensor as a whole and of one of its blocks. The unit is the dtype's
spacing of numbers at 1, 2^-7 in bfloat16. A kernel beyond it is refused. Right kernels have less than half of either,
and a factor of 1.05 is an error of 6.4 units."""
_SUM = 256.0
"""A further error that is allowed, in the spacing of the dtype of sums at 1; that is float32 for narrower dtypes. It
covers the rounding of long sums."""
_BLOCK_ROWS = 64
"""Rows of a block."""
_LEAST = 0.5
"""The smallest norm with which a block's error is compared, as a part of the root mean square norm of such blocks in
the tensor. A block's own gradient may be zero, as that of a query which sees one key. The rounding errors of the
numbers around it are not."""


@dataclass(frozen=True)
class AttentionSpec:
    """Core attention as one rank computes it, for which a kernel is checked.

    Attributes:
        heads: query heads of this rank.
        kv_heads: key/value heads of this rank.
        head_dim: elements per head of queries and keys.
        dtype: dtype of q, k, v and o.
        device: their device.
        causal: False if all query rows see all keys of their task.
        kinds: the kinds of the model's attention layers (window, scale, softcap), each of which is checked. Empty means
            one kind without a window, with a scale of 1/sqrt(head_dim).
        deterministic: whether it must give the same bits every time.
        value_dim: elements per head of values and outputs, if they are fewer; 0 for ``head_dim``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    causal: bool = True
    kinds: tuple[AttentionKind, ...] = ()
    deterministic: bool = False
    value_dim: int = 0

    @property
    def asked(self) -> tuple[AttentionKind, ...]:
        """The kinds to check, without their sinks, which kernels ignore; each once."""
        kinds = self.kinds or (AttentionKind(self.head_dim**-0.5),)
        return tuple(dict.fromkeys(replace(kind, sink=False) for kind in kinds))


@dataclass(frozen=True)
class Distance:
    """The error of one of a kernel's tensors, or of one block of it.

    Attributes:
        tensor: "o", "lse", "dq", "dk" or "dv".
        where: "the whole", or the rows of a block in words.
        off: norm of the difference over norm of the reference.
        explained: the largest such error that rounding to the dtype explains.
    """

    tensor: str
    where: str
    off: float
    explained: float

    @property
    def excess(self) -> float:
        """The error over the largest that rounding explains; above 1 for a wrong kernel."""
        return self.off / self.explained

    def __str__(self) -> str:
        off = f"{self.tensor} is {self.off:.2%} off the reference in {self.where}"
        return f"{off}, and rounding explains {self.explained:.2%}"


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes:
        objection: the reason why the kernel cannot be trusted, as a part of a sentence; None for a right kernel.
        furthest: the error that is largest beside what rounding explains. None for the reference itself, and for a
            kernel that raised an error.
    """

    objection: str | None = None
    furthest: Distance | None = None


def check(kernel: Kernel, spec: AttentionSpec, seed: int = 0) -> Verdict:
    """Compiles a kernel and checks it for all kinds of attention of a model.

    Args:
        kernel: the kernel.
        spec: the kinds of attention, and this rank's heads.
        seed: seed of the random inputs.
    """
    if type(kernel) is ReferenceKernel:
        return Verdict()
    on_gpu = spec.device.type == "cuda"
    try:
        with torch.cuda.device(spec.device) if on_gpu else nullcontext():
            found = []
            for kind in spec.asked:
                what = f"for head dimension {spec.head_dim}{_beside(kind)}"
                found.append(furthest(kernel, spec, kind, seed))
                if found[-1].excess > 1:
                    return Verdict(f"{what} {found[-1]}", found[-1])
                if spec.deterministic and not _repeats(kernel, spec, kind, seed):
                    return Verdict(
                        f"{what} it gives other bits the second time, and it has to be deterministic",
                        found[-1],
                    )
            return Verdict(None, max(found, key=lambda each: each.excess))
    except Exception as error:  # Compilers and drivers raise errors of any kind.
        logger.debug("The self-check of the kernel %s failed.", kernel.name, exc_info=True)
        first_line = (str(error).splitlines() or [""])[0]
        return Verdict(f"for head dimension {spec.head_dim} it fails: {first_line or type(error).__name__}")
    finally:
        with suppress(Exception):  # A wrong kernel may have left the GPU in an error state.
            torch.cuda.empty_cache()


def _beside(kind: AttentionKind) -> str:
    """The kind in words, for messages; nothing for the usual kind."""
    return f" ({kind.name})" if kind.window or kind.softcap else ""


def furthest(kernel: Kernel, spec: AttentionSpec, kind: AttentionKind, seed: int = 0) -> Distance:
    """Runs the kernel and the reference on the batch; returns the error that is largest beside what rounding
    explains. Backward runs twice: from the kernel's own o and lse, and from the reference's."""
    batch, inputs = _batch(spec), _inputs(spec, seed)
    actual = _run(kernel, batch, inputs, kind)
    expected = _run(ReferenceKernel(), batch, [x.double() for x in inputs], kind)
    # A task's backward may run on another server than its forward, by another kernel.
    others = [expected[name].to(actual[name].dtype) for name in ("o", "lse")]
    found: list[Distance] = []
    for tensors in (actual, _run_backward(kernel, batch, inputs, others, kind)):
        for name, values in tensors.items():
            borders = batch.borders_kv if name in ("dk", "dv") else batch.borders_q
            found += _distances(name, values, expected[name], borders, spec.dtype)
    return max(found, key=lambda each: each.excess)


def _batch(spec: AttentionSpec) -> TaskBatch:
    """The batch of :data:`TASKS`."""
    q_borders, kv_borders = np.concatenate((np.zeros((1, 2), int), np.cumsum(TASKS, axis=0))).T.astype(np.int32)
    return TaskBatch.of(q_borders, kv_borders, spec.device, causal=spec.causal)


def _inputs(spec: AttentionSpec, seed: int) -> list[torch.Tensor]:
    """q, k, v and dO, drawn on the CPU, so that they are the same on every machine.

    Keys and values are views of one tensor, as in training, where they travel together."""
    generator = torch.Generator().manual_seed(seed)
    rows, keys = np.sum(TASKS, axis=0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(spec.device, spec.dtype)

    width = spec.value_dim or spec.head_dim
    if width == spec.head_dim:
        k, v = draw(keys, 2, spec.kv_heads, width).unbind(1)
    else:
        k, v = draw(keys, spec.kv_heads, spec.head_dim + width).split((spec.head_dim, width), dim=-1)
    return [draw(rows, spec.heads, spec.head_dim), k, v, draw(rows, spec.heads, width)]


def _run(kernel: Kernel, batch: TaskBatch, inputs: list[torch.Tensor], kind: AttentionKind) -> dict[str, torch.Tensor]:
    q, k, v, _ = inputs
    # Outputs will get this freed memory, so elements that a kernel does not write are nan.
    freed = [torch.full_like(x, float("nan")) for x in (q, q, k, v)]
    del freed
    o, lse = kernel.forward(q, k, v, batch, kind)
    return {"o": o, "lse": lse, **_run_backward(kernel, batch, inputs, [o, lse], kind)}


def _run_backward(
    kernel: Kernel, batch: TaskBatch, inputs: list[torch.Tensor], outputs: list[torch.Tensor], kind: AttentionKind
) -> dict[str, torch.Tensor]:
    q, k, v, do = inputs
    o, lse = outputs
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, batch, kind)
    return {"dq": dq, "dk": dk, "dv": dv}


def _distances(
    name: str, actual: torch.Tensor, expected: torch.Tensor, borders: np.ndarray, dtype: torch.dtype
) -> list[Distance]:
    """The error of the tensor as a whole, and the largest error of its blocks.

    ``borders`` are the first rows of tasks, and the end."""
    # Squares are summed by row and head, then by block with reduceat: off [blocks, H] is the squared relative error.
    difference_RH, norm_RH = (_squares(x) for x in (actual.double() - expected, expected))
    spacing, of_sums = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    whole = Distance(name, "the whole", _root(difference_RH.sum() / norm_RH.sum()), _WHOLE * spacing + _SUM * of_sums)
    starts, tasks = _blocks(borders)
    rows = np.diff(np.append(starts, borders[-1]))[:, None]
    least = _LEAST**2 * rows * norm_RH.mean()
    off = np.add.reduceat(difference_RH, starts) / np.maximum(np.add.reduceat(norm_RH, starts), least)
    at, head = np.unravel_index(np.nan_to_num(off, nan=np.inf).argmax(), off.shape)
    first = starts[at] - borders[tasks[at]]
    task = " queries and ".join(map(str, TASKS[tasks[at]]))
    where = f"rows {first} to {first + rows[at, 0] - 1} of head {head} of a task of {task} keys"
    return [whole, Distance(name, where, _root(off[at, head]), _BLOCK * spacing + _SUM * of_sums)]


def _squares(x: torch.Tensor) -> np.ndarray:
    """[R, H] sums of squares over a head's elements; log-sum-exp has one element."""
    squares = x.square() if x.dim() == 2 else x.square().sum(-1)
    return squares.cpu().numpy()


def _root(square: float) -> float:
    """The square root; infinity for nan."""
    return float(np.sqrt(square)) if np.isfinite(square) else float("inf")


def _blocks(borders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row and the task of each block."""
    starts = [np.arange(begin, end, _BLOCK_ROWS) for begin, end in pairwise(borders)]
    return np.concatenate(starts), np.repeat(np.arange(len(starts)), [len(each) for each in starts])


def _repeats(kernel: Kernel, spec: AttentionSpec, kind: AttentionKind, seed: int) -> bool:
    """Whether two runs of the kernel give the same bits."""
    batch, inputs = _batch(spec), _inputs(spec, seed)
    first, second = (_run(kernel, batch, inputs, kind) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)
