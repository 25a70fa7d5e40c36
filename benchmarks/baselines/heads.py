"""Recurrent layers under per-document context parallelism as Megatron-Core runs them: by an all-to-all of heads.

Each rank sends every other one its rows of that one's heads, so that it has whole documents of its own heads. Another
exchange brings the outputs back. It moves all channels of every row, whatever the documents.

Shape suffixes: N rows of the rank, T rows of the group's documents, C ranks of the group, M rows of its fullest rank; F
channels of one rank's heads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from benchmarks.baselines.groups import CpGroup
from distca.device.host_to_device import Destination, to_device
from distca.errors import SupportError
from distca.plan import lay_out
from distca.recurrent import CoreParameters, Recurrence, choose_recurrent_kernel
from distca.runtime import AttentionPool
from distca.runtime.recurrent_call import recurrent_core
from distca.runtime.recurrent_routes import RecurrentRoutes


def routes_of(lengths: np.ndarray, halos: Collection[int], device: Destination) -> dict[int, RecurrentRoutes]:
    """Routes that move nothing, of whole documents one after the other on one rank, by rows of halo."""
    layouts = lay_out(np.asarray(lengths), 1)
    return {size: RecurrentRoutes.of(layouts, 0, size, device)[0] for size in halos}


@dataclass(frozen=True)
class GroupHeads:
    """The documents of a group.

    Attributes:
        group: the context-parallel group.
        rows: of this rank.
        most: rows of the group's fullest rank.
        place: [T] int64, where each token is among all ranks' rows.
        token: [C · M] int64, the inverse; 0 where no token is.
        routes: of the whole documents, by rows of halo.
    """

    group: CpGroup
    rows: int
    most: int
    place: torch.Tensor
    token: torch.Tensor
    routes: Mapping[int, RecurrentRoutes]

    @staticmethod
    def of(
        group: CpGroup,
        rows: int,
        most: int,
        place: np.ndarray,
        lengths: np.ndarray,
        halos: Collection[int],
        device: Destination,
    ) -> GroupHeads:
        """``lengths``: of the group's documents, as ``place`` has them."""
        token = np.zeros(group.size * most, np.int64)
        token[place] = np.arange(len(place))
        routes = routes_of(lengths, halos, device)
        return GroupHeads(group, rows, most, to_device(place, device), to_device(token, device), routes)

    def recur(
        self,
        pool: AttentionPool,
        layer: int,
        what: Recurrence,
        parameters: CoreParameters,
        mixed_NC: torch.Tensor,
        g: torch.Tensor,
        beta_NH: torch.Tensor,
    ) -> torch.Tensor:
        """o_NHV of this rank's rows; arguments as for DistCA.

        Raises:
            SupportError: the group has more ranks than there are heads of keys to share.
        """
        ranks = self.group.size
        if what.key_heads % ranks:
            raise SupportError(
                f"An all-to-all of heads over {ranks} ranks needs a multiple of as many heads of keys, but a "
                f"tensor-parallel rank has {what.key_heads}: take fewer context-parallel ranks."
            )
        mine = replace(what, key_heads=what.key_heads // ranks, heads=what.heads // ranks)
        parts = mixed_NC.split(what.widths, dim=1)
        mixed = self._to_heads(torch.cat([part.unflatten(1, (ranks, -1)) for part in parts], dim=2))
        gates = self._to_heads(torch.cat([x.unflatten(1, (ranks, -1)) for x in (g, beta_NH)], dim=2))
        decay, beta = gates.split((gates.shape[1] - mine.heads, mine.heads), dim=1)
        kernel = choose_recurrent_kernel(mine, mixed_NC.device, mixed_NC.dtype)
        routes = self.routes[what.halo_rows]
        own = self._own(parameters, what)
        o_ThV = recurrent_core(pool, routes, mine, kernel, layer, own, mixed, decay, beta.to(beta_NH.dtype))
        o_NCF = self._to_rows(o_ThV.flatten(1))
        padding = len(mixed_NC) - self.rows
        return torch.nn.functional.pad(o_NCF.flatten(1), (0, 0, 0, padding)).unflatten(1, (what.heads, -1))

    def _own(self, parameters: CoreParameters, what: Recurrence) -> CoreParameters:
        """The weights of this rank's heads."""

        def share(x: torch.Tensor | None, widths: tuple[int, ...]) -> torch.Tensor | None:
            if x is None:
                return None
            return torch.cat([part.chunk(self.group.size)[self.group.rank] for part in x.split(widths)])

        kernel = share(parameters.kernel, what.widths)
        assert kernel is not None
        return CoreParameters(kernel, share(parameters.bias, what.widths), share(parameters.skip, (what.heads,)))

    def _to_heads(self, x_NCF: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x_NCF[: self.rows], (0, 0, 0, 0, 0, self.most - self.rows))
        received_CMF = _Exchange.apply(padded.transpose(0, 1).contiguous(), self.group.group)
        return received_CMF.flatten(0, 1).index_select(0, self.place)

    def _to_rows(self, x_TF: torch.Tensor) -> torch.Tensor:
        spread = _Spread.apply(x_TF, self.token, self.place)
        received_CMF = _Exchange.apply(spread.unflatten(0, (self.group.size, -1)), self.group.group)
        rows: torch.Tensor = received_CMF[:, : self.rows].transpose(0, 1)
        return rows


class _Spread(torch.autograd.Function):
    """Puts tokens where all ranks' rows have them; no rank reads rows where no token is.

    For index_copy autograd would keep all rows, and backward of index_select would add up."""

    @staticmethod
    def forward(ctx: Any, x_TF: torch.Tensor, token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        return x_TF.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (place,) = ctx.saved_tensors
        return gradient.index_select(0, place), None, None


class _Exchange(torch.autograd.Function):
    """Gives each rank of the group its part along the first axis; backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient, group=ctx.group)
        return received, None
