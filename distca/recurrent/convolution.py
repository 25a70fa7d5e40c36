"""The way from a projection's rows to the rows of a recurrent core: a short causal convolution, SiLU, heads, norms.

A *piece* is a run of a document's rows on one rank. The convolution reads for each row J rows: the row itself and J - 1
before it. The J - 1 rows before a piece are its *halo*; ranks send each other these rows. On GPUs Triton kernels
compute it (ops/triton/core_rows.py), elsewhere torch.

Shape suffixes: N rows of the rank (padding included), H heads, K elements of a head of q or k; C channels of the
convolution, J rows that it reads, U halo rows that arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn import functional

from distca.device.host_to_device import to_device
from distca.ops.triton import has_kernels
from distca.plan.recurrence import Recurrence
from distca.recurrent.kernel import CoreRows, Span

_NORM_EPSILON = 1e-6
"""Added to the squared norm of a head of q or k, by whose root the head is divided."""


@dataclass(frozen=True)
class CoreParameters:
    """The weights of a recurrent core, for the heads of one tensor-parallel rank.

    Attributes:
        kernel: kernel_CJ of the convolution; the last weight is that of the row itself.
        bias: bias_C of the convolution; None for none.
        skip: skip_H, the factor with which v is added to the output, Mamba-2's D; None for none.
    """

    kernel: torch.Tensor
    bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None


@dataclass(frozen=True)
class PieceRows:
    """A rank's pieces and their halo rows.

    Attributes:
        spans: first row of each piece and one past its last, in the order of rows.
        continues: for each piece, whether it continues a document, and so has a halo.
        picked: int64 [pieces that continue a document, J - 1], the number of each halo row among the U rows that
            arrived. U stands for a row before the document's start, which is zero.
    """

    spans: Sequence[Span]
    continues: Sequence[bool]
    picked: torch.Tensor

    @cached_property
    def taps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pieces in the form of the Triton kernels, which :data:`distca.ops.triton.core_rows.Taps` explains."""
        width = self.picked.shape[1]
        continued = np.cumsum(self.continues) - 1
        halo = np.where(self.continues, continued * width, -1)
        table = np.column_stack((np.array(self.spans).reshape(-1, 2), halo)).astype(np.int32)
        piece = np.repeat(np.arange(len(table), dtype=np.int32), table[:, 1] - table[:, 0])
        device = self.picked.device
        return to_device(piece, device), to_device(table, device), self.picked.flatten()

    @cached_property
    def halo_pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All pairs of a halo row and a piece's row that reads it, as three int64 arrays.

        They are the index of the halo row in the flat ``picked``, the reading row, and the distance of both. Example: a
        piece from row f on has 3 halo rows, with the indices 0, 1 and 2. Its first three rows read the last of these,
        its first two the one before. The pairs are (0, f, 3), (1, f, 2), (1, f + 1, 3), (2, f, 1), (2, f + 1, 2) and
        (2, f + 2, 3)."""
        width = self.picked.shape[1]
        begins = [span for span, continues in zip(self.spans, self.continues, strict=True) if continues]
        found = [
            (number * width + place, begin + reader, width - place + reader)
            for number, (begin, end) in enumerate(begins)
            for place in range(width)
            for reader in range(min(place + 1, end - begin))
        ]
        device = self.picked.device
        place, row, between = np.array(found, dtype=np.int64).reshape(-1, 3).T.copy()
        return to_device(place, device), to_device(row, device), to_device(between, device)


def core_rows(
    mixed_NC: torch.Tensor,
    g: torch.Tensor,
    beta_NH: torch.Tensor,
    halo_UC: torch.Tensor,
    parameters: CoreParameters,
    pieces: PieceRows,
    what: Recurrence,
) -> CoreRows:
    """The core's rows of all pieces; q, k and v are zero in padding.

    Args:
        mixed_NC: the projection's rows, the input of the convolution.
        g: g_NH, passed on.
        beta_NH: passed on.
        halo_UC: halo rows that arrived.
        parameters: the convolution's weights.
        pieces: the pieces and their halo rows.
        what: the shapes of heads and the order of q, k and v among the channels.
    """
    if has_kernels(mixed_NC, "convolution"):
        q, k, v = fused_rows(mixed_NC, halo_UC, parameters, pieces, what)
        return CoreRows(q, k, v, g, beta_NH)
    activated = functional.silu(_convolved(mixed_NC, halo_UC, parameters, pieces))
    return rows_of_heads(activated, g, beta_NH, what)


def fused_rows(
    mixed_NC: torch.Tensor,
    halo_UC: torch.Tensor,
    parameters: CoreParameters,
    pieces: PieceRows,
    what: Recurrence,
) -> tuple[torch.Tensor, ...]:
    """Returns q, k and v of :func:`core_rows`, computed by Triton kernels; arguments as there."""
    from distca.ops.triton.core_rows import CoreRowsOf, Head

    epsilon = _NORM_EPSILON if what.normalise else None
    of_name: dict[str, Head] = {}
    first = 0
    for name, width in zip(what.columns, what.widths, strict=True):
        if name == "v":
            of_name[name] = Head(first, what.heads, what.value_dim)
        else:
            of_name[name] = Head(first, what.key_heads, what.key_dim, what.heads // what.key_heads, epsilon)
        first += width
    heads = tuple(of_name[name] for name in ("q", "k", "v"))
    found: tuple[torch.Tensor, ...] = CoreRowsOf.apply(
        mixed_NC, halo_UC, parameters.kernel, parameters.bias, pieces.taps, pieces.halo_pairs, heads
    )
    return found


def rows_of_heads(activated_NC: torch.Tensor, g: torch.Tensor, beta_NH: torch.Tensor, what: Recurrence) -> CoreRows:
    """The core's rows from the convolution's output; other arguments are as in :func:`core_rows`."""
    of_name = dict(zip(what.columns, activated_NC.split(what.widths, dim=1), strict=True))
    q, k = (of_name[name].unflatten(1, (what.key_heads, what.key_dim)) for name in ("q", "k"))
    if what.normalise:
        q, k = _unit(q), _unit(k)
    if what.key_heads != what.heads:
        q, k = (each.repeat_interleave(what.heads // what.key_heads, dim=1) for each in (q, k))
    return CoreRows(q, k, of_name["v"].unflatten(1, (what.heads, what.value_dim)), g, beta_NH)


def _unit(heads: torch.Tensor) -> torch.Tensor:
    """Heads divided by their norm, computed in at least float32."""
    square = heads.to(torch.promote_types(heads.dtype, torch.float32)).square().sum(-1, keepdim=True)
    return (heads * torch.rsqrt(square + _NORM_EPSILON)).to(heads.dtype)


def _convolved(
    mixed_NC: torch.Tensor, halo_UC: torch.Tensor, parameters: CoreParameters, pieces: PieceRows
) -> torch.Tensor:
    """The convolution's output by torch; zero in padding."""
    # "extended" has each piece behind its halo, or behind zeros, one after the other. The convolution runs over all of
    # it, and "places" are the results that belong to rows of pieces.
    width = parameters.kernel.shape[1] - 1
    nothing = mixed_NC.new_zeros(width, mixed_NC.shape[1])
    picked = pieces.picked.flatten()
    halo = torch.cat((halo_UC, mixed_NC.new_zeros(1, mixed_NC.shape[1]))).index_select(0, picked)
    before = iter(halo.unflatten(0, pieces.picked.shape))
    parts, places, at = [mixed_NC[:0]], [picked[:0]], 0
    for (begin, end), continues in zip(pieces.spans, pieces.continues, strict=True):
        parts += [next(before) if continues else nothing, mixed_NC[begin:end]]
        places.append(torch.arange(at, at + end - begin, device=mixed_NC.device))
        at += width + end - begin
    padding = len(mixed_NC) - sum(end - begin for begin, end in pieces.spans)
    extended = torch.cat(parts)
    rows = max(len(extended) - width, 0)
    found = sum(extended[j : j + rows] * parameters.kernel[:, j] for j in range(width + 1))
    assert isinstance(found, torch.Tensor)
    if parameters.bias is not None:
        found = found + parameters.bias
    found = found.index_select(0, torch.cat(places))
    return torch.cat((found, nothing.new_zeros(padding, mixed_NC.shape[1])))
