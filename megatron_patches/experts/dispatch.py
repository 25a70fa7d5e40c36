"""Rows on their way to the experts that they were routed to, over expert-parallel ranks, and back.

Every row goes to ``topk`` experts, so nothing is dropped and the rows that a rank sends are known beforehand. How many
come from whom is not, which every rank asks the others and then, once, its device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from distca.ops.grouped_linear import Groups


@dataclass(frozen=True)
class Dispatch:
    """The way of one half's rows to experts.

    Attributes:
        group: the expert-parallel ranks; rank r has the r-th part of all experts.
        topk: experts of a row.
        row_P: [rows x topk] int64 the row of each pair of a row and an expert, by expert.
        expert_P: [rows x topk] int64 its expert.
        pair_NK: [rows, topk] int64 the pairs of each row.
        sent: pairs that go to each rank.
        received: pairs that come from each rank.
        by_expert: [received pairs] int64 the pairs that came, by expert of this rank.
        by_source: its inverse.
        groups: pairs of each expert of this rank.
    """

    group: dist.ProcessGroup
    topk: int
    row_P: torch.Tensor
    expert_P: torch.Tensor
    pair_NK: torch.Tensor
    sent: list[int]
    received: list[int]
    by_expert: torch.Tensor
    by_source: torch.Tensor
    groups: Groups

    @classmethod
    def of(cls, chosen_NE: torch.Tensor, topk: int, group: dist.ProcessGroup) -> Dispatch:
        """Every rank of the group calls it together.

        Args:
            chosen_NE: [rows, experts] bool, ``topk`` of each row true.
            topk: experts of a row.
            group: the expert-parallel ranks.
        """
        experts = chosen_NE.shape[1]
        ranks, device = group.size(), chosen_NE.device
        here = experts // ranks
        counts = chosen_NE.sum(0)
        gathered = counts.new_empty(ranks * experts)
        dist.all_gather_into_tensor(gathered, counts, group=group)
        everyone = gathered.view(ranks, experts)
        row_P, expert_P, pair_NK = _pairs(chosen_NE, topk)
        me = dist.get_rank(group)
        # The one synchronisation with the host.
        counted = torch.cat((everyone[me].view(ranks, here), everyone[:, me * here : (me + 1) * here])).cpu()
        to_me = counted[ranks:]
        sent, received = counted[:ranks].sum(1).tolist(), to_me.sum(1).tolist()
        expert = torch.arange(here).repeat(ranks).repeat_interleave(to_me.flatten())
        by_expert = expert.argsort(stable=True)
        by_source = torch.empty_like(by_expert)
        by_source[by_expert] = torch.arange(len(by_expert))
        order = torch.stack((by_expert, by_source)).to(device, non_blocking=True)
        ends = everyone[:, me * here : (me + 1) * here].sum(0).cumsum(0).int()
        groups = Groups(to_me.sum(0).tolist(), ends)
        return cls(group, topk, row_P, expert_P, pair_NK, sent, received, order[0], order[1], groups)

    def send(self, hidden_NH: torch.Tensor, probs_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[received pairs, hidden] rows and [received pairs] probabilities, by expert of this rank."""
        rows = _Spread.apply(hidden_NH, self.row_P, self.pair_NK)
        probs = probs_NE.flatten().gather(0, self.row_P * probs_NE.shape[1] + self.expert_P)
        return tuple(_Sorted.apply(self._to_experts(each), self.by_expert, self.by_source) for each in (rows, probs))  # type: ignore[return-value]

    def bring_back(self, output_PH: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] the sum over each row's experts, of what those put out in the order of :meth:`send`."""
        by_source = _Sorted.apply(output_PH, self.by_source, self.by_expert)
        back = _AllToAll.apply(by_source, self.group, self.received, self.sent)
        summed: torch.Tensor = _Gathered.apply(back, self.row_P, self.pair_NK)
        return summed

    def _to_experts(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = _AllToAll.apply(x, self.group, self.sent, self.received)
        return moved


def _pairs(chosen_NE: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``row_P``, ``expert_P`` and ``pair_NK``; their sizes are known without asking the device."""
    rows, experts = chosen_NE.shape
    device, pairs = chosen_NE.device, rows * topk
    number_NE = chosen_NE.T.flatten().cumsum(0).view(experts, rows).T - 1
    nth_NE = chosen_NE.cumsum(1) - 1 + torch.arange(rows, device=device)[:, None] * topk
    # What was not chosen goes to one place more, which is cut off.
    slot = torch.where(chosen_NE, nth_NE, pairs).flatten()
    pair_NK = torch.empty(pairs + 1, dtype=torch.int64, device=device).scatter_(0, slot, number_NE.flatten())[:-1]
    expert_NK = torch.empty(pairs + 1, dtype=torch.int64, device=device).scatter_(
        0, slot, torch.arange(experts, device=device).repeat(rows)
    )[:-1]
    row_P, expert_P = (torch.empty(pairs, dtype=torch.int64, device=device) for _ in range(2))
    row_P[pair_NK] = torch.arange(rows, device=device).repeat_interleave(topk)
    expert_P[pair_NK] = expert_NK
    return row_P, expert_P, pair_NK.view(rows, topk)


class _Spread(torch.autograd.Function):
    """Rows, once for each expert; their gradients are added up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_NH: torch.Tensor, row_P: torch.Tensor, pair_NK: torch.Tensor) -> torch.Tensor:
        ctx.pair_NK = pair_NK
        return x_NH[row_P]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_PH: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return d_PH[ctx.pair_NK].sum(1), None, None


class _Gathered(torch.autograd.Function):
    """The sum over each row's experts."""

    @staticmethod
    def forward(ctx: Any, y_PH: torch.Tensor, row_P: torch.Tensor, pair_NK: torch.Tensor) -> torch.Tensor:
        ctx.row_P = row_P
        return y_PH[pair_NK].sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NH: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return d_NH[ctx.row_P], None, None


class _Sorted(torch.autograd.Function):
    """Rows in another order, whose inverse is known."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return x[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return d[ctx.inverse], None, None


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; backward brings gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        ctx.way = group, received, sent
        return _exchanged(x, group, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _exchanged(d, *ctx.way), None, None, None


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> torch.Tensor:
    if group.size() == 1:
        return x
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out
