"""Recurrent layers by fla's own context parallelism: a group's documents as one sequence, in equal contiguous parts.

fla's functions exchange the rows that convolutions read before a part, and gather what each part makes of a state. They
run on GPUs only. Where two parts would differ by a row, a document of one row of padding comes first.

Shape suffixes: N rows of the rank, C channels of the convolution, H heads, V elements of a head of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from benchmarks.baselines.groups import CpGroup
from distca.errors import SupportError
from distca.recurrent import CoreParameters, Recurrence, choose_recurrent_kernel
from distca.recurrent.convolution import rows_of_heads
from distca.recurrent.fla_delta_rule import let_fla_differentiate


@dataclass(frozen=True)
class FlaParts:
    """A rank's part of a group's documents.

    Attributes:
        group: the context-parallel group, of two ranks.
        rows: of this rank.
        before: rows of padding before them.
        borders: int64, where documents begin and end, the padding first.
        device: this rank's.
    """

    group: CpGroup
    rows: int
    before: int
    borders: np.ndarray
    device: torch.device

    @staticmethod
    def of(group: CpGroup, rows: int, lengths: np.ndarray, device: torch.device) -> FlaParts:
        """``lengths``: of the group's documents."""
        padding = int(lengths.sum()) % group.size
        borders = np.cumsum([0, *([padding] if padding else []), *lengths])
        before = padding if group.rank == 0 else 0
        assert group.size == 2 and group.size * (rows + before) == borders[-1]
        return FlaParts(group, rows, before, borders, device)

    def recur(
        self,
        what: Recurrence,
        parameters: CoreParameters,
        mixed_NC: torch.Tensor,
        g: torch.Tensor,
        beta_NH: torch.Tensor,
    ) -> torch.Tensor:
        """o_NHV of this rank's rows, zero in padding; arguments as for DistCA.

        Raises:
            SupportError: another recurrence than the gated delta rule.
        """
        if not what.delta:
            raise SupportError("fla's context parallelism was built here for the gated delta rule alone.")
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        let_fla_differentiate(choose_recurrent_kernel(what, mixed_NC.device, mixed_NC.dtype))
        mixed, g, beta = (self._part(each) for each in (mixed_NC, g, beta_NH))
        activated, _ = causal_conv1d(
            x=mixed[None],
            weight=parameters.kernel,
            bias=parameters.bias,
            activation="silu",
            cp_context=self._context,
        )
        rows = rows_of_heads(activated[0], g, beta, what)
        named = dict(zip(("q", "k", "v", "g", "beta"), (each[None] for each in rows.all), strict=True))
        o, _ = chunk_gated_delta_rule(**named, scale=what.scale, cp_context=self._context)
        own = o[0, self.before :]
        return pad(own, (0, 0, 0, 0, 0, len(mixed_NC) - self.rows))

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of this rank with the padding before them."""
        return pad(x[: self.rows], (*(0, 0) * (x.dim() - 1), self.before, 0))

    @cached_property
    def _context(self) -> Any:
        from fla.ops.cp import build_cp_context

        borders = torch.from_numpy(self.borders)
        return build_cp_context(borders.to(self.device), self.group.group, conv1d_kernel_size=4, cu_seqlens_cpu=borders)
