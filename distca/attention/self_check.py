"""Whether a kernel computes on this machine what the reference computes: a small mixed batch, forward and backward.

A new version of a library, a new GPU or a head dimension that nobody tried can make a kernel wrong without a word. So a
kernel proves itself where it would be compiled anyway. Its tensors are compared as wholes, which shows a factor. They
are also compared by blocks of each task and head. That shows a last tile that is missing, or a diagonal that is off by
one.

Shape suffixes as in kernel.py; R rows of either kind.
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
"""(query rows, key/value rows) of the batch's tasks: length 1, odd lengths, more keys than queries, up to six tiles."""

_WHOLE, _BLOCK = 1.5, 4.0
"""How far off a right kernel may be, in units of the dtype's spacing of numbers at 1 (2^-7 in bfloat16): a tensor as a
whole, and any block of it. Right kernels stay below half of either, and a factor of 1.05 is 6.4 units."""
_SUM = 256.0
"""The same, of what sums are computed in, float32 for narrower dtypes: rounding of long sums in float32 itself."""
_BLOCK_ROWS = 64
_LEAST = 0.5
"""A block counts as at least so large, by the root mean square of its tensor: rounding of the numbers around it does
not vanish where its own gradient does, as that of a query that sees one key."""


@dataclass(frozen=True)
class AttentionSpec:
    """Core attention as one rank computes it, which a kernel is checked for.

    Attributes:
        heads: query heads of this rank.
        kv_heads: key/value heads of this rank.
        head_dim: elements per head of queries and keys.
        dtype: of q, k, v and o.
        device: where they live.
        causal: False where all query rows see all keys of their task.
        kinds: of the model's layers, each of which is checked; none is one without a window, with 1/sqrt(head_dim) as
            the factor on scores.
        deterministic: backward has to give the same bits every time.
        value_dim: elements per head of values and outputs, where they are fewer; 0 for ``head_dim``.
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
        """The kinds as kernels know them, which take no part in sinks; each once."""
        kinds = self.kinds or (AttentionKind(self.head_dim**-0.5),)
        return tuple(dict.fromkeys(replace(kind, sink=False) for kind in kinds))


@dataclass(frozen=True)
class Distance:
    """How far a kernel's tensor is off, where it is furthest beyond what its dtype explains.

    Attributes:
        tensor: "o", "lse", "dq", "dk" or "dv".
        where: "the whole", or which rows of which head and task.
        off: norm of the difference over norm of the reference.
        explained: the most that rounding to the dtype explains.
    """

    tensor: str
    where: str
    off: float
    explained: float

    @property
    def excess(self) -> float:
        """Above 1 for a kernel that is wrong."""
        return self.off / self.explained

    def __str__(self) -> str:
        off = f"{self.tensor} is {self.off:.2%} off the reference in {self.where}"
        return f"{off}, and rounding explains {self.explained:.2%}"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a self-check.

    Attributes:
        objection: why the kernel cannot be trusted, part of a sentence; None if it is right.
        furthest: the figures; None where none were taken, of the reference itself or of a kernel that failed.
    """

    objection: str | None = None
    furthest: Distance | None = None


def check(kernel: Kernel, spec: AttentionSpec, seed: int = 0) -> Verdict:
    """Prove a kernel for kinds of attention on this machine; it is compiled by this.

    Args:
        kernel: the kernel.
        spec: the kinds of attention, and this rank's heads.
        seed: of the numbers.
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
                        f"{what} its backward gives other bits the second time, and it has to be deterministic",
                        found[-1],
                    )
            return Verdict(None, max(found, key=lambda each: each.excess))
    except Exception as error:  # compilers and drivers raise anything
        logger.debug("The self-check of the kernel %s failed.", kernel.name, exc_info=True)
        first_line = (str(error).splitlines() or [""])[0]
        return Verdict(f"for head dimension {spec.head_dim} it fails: {first_line or type(error).__name__}")
    finally:
        with suppress(Exception):  # of a GPU that a kernel left broken
            torch.cuda.empty_cache()


def _beside(kind: AttentionKind) -> str:
    return f" ({kind.name})" if kind.window or kind.softcap else ""


def furthest(kernel: Kernel, spec: AttentionSpec, kind: AttentionKind, seed: int = 0) -> Distance:
    """Run kernel and reference on the mixed batch and return the distance that is furthest beyond what is
    explained."""
    batch, inputs = _batch(spec), _inputs(spec, seed)
    actual = _run(kernel, batch, inputs, kind)
    expected = _run(ReferenceKernel(), batch, [x.double() for x in inputs], kind)
    found: list[Distance] = []
    for name, values in actual.items():
        borders = batch.borders_kv if name in ("dk", "dv") else batch.borders_q
        found += _distances(name, values, expected[name], borders, spec.dtype)
    return max(found, key=lambda each: each.excess)


def _batch(spec: AttentionSpec) -> TaskBatch:
    q_borders, kv_borders = np.concatenate((np.zeros((1, 2), int), np.cumsum(TASKS, axis=0))).T.astype(np.int32)
    return TaskBatch.of(q_borders, kv_borders, spec.device, causal=spec.causal)


def _inputs(spec: AttentionSpec, seed: int) -> list[torch.Tensor]:
    """q, k, v and dO, drawn on the CPU, so that they are the same everywhere. Keys and values lie beside each other, as
    they travel."""
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
    q, k, v, do = inputs
    # Outputs get this memory: what a kernel leaves unwritten is no number, and not what another kernel wrote there.
    freed = [torch.full_like(x, float("nan")) for x in (q, q, k, v)]
    del freed
    o, lse = kernel.forward(q, k, v, batch, kind)
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, batch, kind)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _distances(
    name: str, actual: torch.Tensor, expected: torch.Tensor, borders: np.ndarray, dtype: torch.dtype
) -> list[Distance]:
    """Distance of the tensor as a whole, and the furthest of all its blocks."""
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
    """[R, H] sums of squares over a head's elements; log-sum-exp has one."""
    squares = x.square() if x.dim() == 2 else x.square().sum(-1)
    return squares.cpu().numpy()


def _root(square: float) -> float:
    """Infinite where it is no number."""
    return float(np.sqrt(square)) if np.isfinite(square) else float("inf")


def _blocks(borders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First row and task of every block."""
    starts = [np.arange(begin, end, _BLOCK_ROWS) for begin, end in pairwise(borders)]
    return np.concatenate(starts), np.repeat(np.arange(len(starts)), [len(each) for each in starts])


def _repeats(kernel: Kernel, spec: AttentionSpec, kind: AttentionKind, seed: int) -> bool:
    batch, inputs = _batch(spec), _inputs(spec, seed)
    first, second = (_run(kernel, batch, inputs, kind) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)
