"""The check of a kernel for recurrent cores on this machine, against the reference kernel in float64.

Before it is chosen (select.py), a kernel computes a few *pieces* (runs of rows of documents) of odd lengths: outputs,
states, summaries and all gradients. Each tensor is compared as a whole, and by *parts*: the numbers of one piece and
head. :func:`check_rows` does the same for the convolution before the core.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from functools import partial
from itertools import accumulate, pairwise

import torch

from distca.ops.self_check import Draw, Outputs, why_wrong
from distca.plan.recurrence import Recurrence
from distca.recurrent.convolution import CoreParameters, PieceRows, core_rows
from distca.recurrent.kernel import CoreRows, RecurrentKernel, Span
from distca.recurrent.reference import ReferenceRecurrence

logger = logging.getLogger(__name__)

LENGTHS = (1, 3, 63, 64, 65, 150)
"""Rows of the pieces. Kernels compute chunks of 64 rows, so the longest piece has three."""

_WHOLE, _BLOCK = 1.5, 6.0
"""The largest error, relative to the norm, of a tensor as a whole and of one of its parts. The unit is the dtype's
spacing of numbers at 1, 2^-7 in bfloat16. A kernel beyond it is refused."""
_LEAST = 0.5
"""The smallest norm with which a part's error is compared. It is this times the root mean square norm of parts, in the
same piece or in the whole tensor, whichever is larger. In few rows a head's gradient can be a small difference of large
numbers."""


def check(
    kernel: RecurrentKernel, what: Recurrence, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> str | None:
    """Compiles a kernel and checks it.

    Args:
        kernel: the kernel.
        what: the recurrence.
        dtype: dtype of q, k, v and outputs.
        device: their device.
        seed: seed of the random inputs.

    Returns:
        The reason why the kernel cannot be trusted, as a part of a sentence; None for a right kernel.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            tensor, excess = furthest(kernel, what, dtype, device, seed)
    except Exception as error:  # Compilers and drivers raise errors of any kind.
        logger.debug("The self-check of the kernel %s failed.", kernel.name, exc_info=True)
        first_line = (str(error).splitlines() or [""])[0]
        return f"it fails: {first_line or type(error).__name__}"
    finally:
        with suppress(Exception):  # A wrong kernel may have left the GPU in an error state.
            torch.cuda.empty_cache()
    return f"its {tensor} is {excess:.3g} times as far off the reference as rounding explains" if excess > 1 else None


def furthest(
    kernel: RecurrentKernel, what: Recurrence, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[str, float]:
    """Returns the name of the tensor with the largest error, and this error over the largest that is allowed."""
    ends = list(accumulate((0, *LENGTHS)))
    # One further row is padding. The fourth piece is left out, so pieces do not all follow each other in memory.
    spans = [span for span in pairwise(ends) if span[1] - span[0] != 64]
    rows, do, states, dstates = _inputs(what, ends[-1] + 1, len(spans), dtype, device, seed)
    actual = outcome(kernel, rows, spans, do, states, dstates)
    wide = CoreRows(*(each.double() for each in rows.all))
    expected = outcome(ReferenceRecurrence(what), wide, spans, do.double(), states.double(), dstates.double())
    spacing = torch.finfo(dtype).eps
    return max(
        ((name, _excess(actual[name], expected[name], spans, spacing)) for name in expected), key=lambda each: each[1]
    )


def _inputs(
    what: Recurrence, rows: int, pieces: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[CoreRows, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rows, dO, the states before the pieces and the gradients of the states behind them."""
    generator = torch.Generator().manual_seed(seed + 1)
    states, dstates = (torch.randn(pieces, *what.state_shape, generator=generator).to(device) for _ in range(2))
    return *drawn_rows(what, rows, dtype, device, seed), states, dstates


def drawn_rows(
    what: Recurrence, count: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[CoreRows, torch.Tensor]:
    """Returns random rows of a core and gradients of its outputs, drawn on the CPU: the same on every machine."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (draw(count, what.heads, what.key_dim) for _ in range(2))
    if what.normalise:
        q, k = (torch.nn.functional.normalize(each, dim=-1) for each in (q, k))
    v, do = (draw(count, what.heads, what.value_dim).to(dtype) for _ in range(2))
    g = -0.1 * torch.nn.functional.softplus(draw(count, what.heads))
    beta = draw(count, what.heads).sigmoid().to(dtype)
    rows = CoreRows(*(each.to(device) for each in (q.to(dtype), k.to(dtype), v, g, beta)))
    return rows, do.to(device)


def outcome(
    kernel: RecurrentKernel,
    rows: CoreRows,
    spans: list[Span],
    do: torch.Tensor,
    states: torch.Tensor,
    dstates: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Returns all that a kernel computes, by name. Rows outside of the pieces are zero, unless the kernel wrote
    them."""
    o, gradients = torch.zeros_like(rows.v), rows.zeros_like()
    found = {"o": o, "state behind a piece": kernel.forward(rows, spans, states, o)}
    found["own state"], found["transition"] = kernel.summaries(rows, spans)
    found["gradient of a state alone"] = kernel.state_gradients(rows, spans, do)
    found["gradient of a state"] = kernel.backward(rows, spans, states, do, dstates, gradients)
    return found | {f"d{name}": each for name, each in zip(("q", "k", "v", "g", "beta"), gradients.all, strict=True)}


def _excess(actual: torch.Tensor, expected: torch.Tensor, spans: list[Span], spacing: float) -> float:
    """The largest error of the tensor and of its parts, over the largest that is allowed.

    It is infinite if there is a nan, or if a row outside of the pieces was written."""
    off, size = (actual.double() - expected).square(), expected.square()
    excess = (off.sum() / size.sum()).sqrt() / (_WHOLE * spacing)
    if len(expected) != len(spans):  # rows, not states
        outside = torch.ones(len(expected), dtype=torch.bool)
        for span in spans:
            outside[slice(*span)] = False
        if actual[outside.to(actual.device)].any():
            return float("inf")
        parts = [(off[slice(*span)], size[slice(*span)]) for span in spans]
    else:
        parts = list(zip(off[:, None], size[:, None], strict=True))
    for part_off, part_size in parts:
        least = _LEAST**2 * torch.maximum(size.mean(), part_size.mean()) * part_size[:, 0].numel()
        by_head = [_by_head(each) for each in (part_off, part_size)]
        excess = torch.maximum(
            excess, (by_head[0] / by_head[1].clamp(min=least.item())).sqrt().max() / (_BLOCK * spacing)
        )
    return float(torch.nan_to_num(excess, nan=float("inf")))


def _by_head(part: torch.Tensor) -> torch.Tensor:
    """Sums over all but the second dimension, the heads."""
    return part.transpose(0, 1).flatten(1).sum(1)


def check_rows(what: Recurrence, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns the reason why the convolution's kernels cannot be trusted, as a part of a sentence; None if they are
    right.

    Args:
        what: the recurrence, with this rank's heads.
        dtype: dtype of rows and weights.
        device: their device.
    """
    return why_wrong(partial(_rows_of_pieces, what), dtype, device)


def _rows_of_pieces(what: Recurrence, draw: Draw) -> Outputs:
    """q, k and v of some pieces, and all gradients; two thirds of the pieces continue documents, and so have a halo."""
    ends, arrived = list(accumulate((0, *LENGTHS))), 5
    continues = [number % 3 != 1 for number in range(len(LENGTHS))]
    picked = torch.randint(0, arrived + 1, (sum(continues), what.halo_rows), generator=draw.generator)
    pieces = PieceRows(list(pairwise(ends)), continues, picked.to(draw.device))
    sizes = (ends[-1] + 1, what.channels), (arrived, what.channels), (what.channels, what.kernel), (what.channels,)
    leaves = [draw(*size).requires_grad_() for size in sizes]
    mixed, halo, kernel, bias = leaves
    gates = draw.wide(len(mixed), what.heads)
    rows = core_rows(mixed, gates, gates, halo, CoreParameters(kernel, bias), pieces, what)
    outputs = {"q": rows.q, "k": rows.k, "v": rows.v}
    found = torch.autograd.grad(list(outputs.values()), leaves, [draw(*each.shape) for each in outputs.values()])
    names = ("gradients of rows", "gradients of the halo", "gradients of weights", "gradients of biases")
    return outputs | dict(zip(names, found, strict=True))
