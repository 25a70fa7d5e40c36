"""The ways of rows that a router sends to experts on expert-parallel ranks, and back.

Every row goes to ``topk`` experts, so nothing is dropped and the rows that a rank sends are known beforehand. How many
come from whom is not, which every rank asks the others and then, once, its device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.ops.grouped_linear import Groups


@dataclass(frozen=True)
class Dispatch:
    """The way of one half's rows to experts.

    Attributes:
        group: the expert-parallel ranks; rank r has the r-th part of all experts.
        row_P: [rows x topk] int64 the row of each pair of a row and an expert, by expert.
        score_P: [rows x topk] int64 its place in the flat probabilities of all rows and experts.
        pair_NK: [rows, topk] int64 the pairs of each row.
        sent: pairs that go to each rank.
        received: pairs that come from each rank.
        by_expert: [received pairs] int64 the pairs that came, by expert of this rank.
        by_source: its inverse.
        groups: pairs of each expert of this rank.
    """

    group: dist.ProcessGroup
    row_P: torch.Tensor
    score_P: torch.Tensor
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
        ranks, me = group.size(), dist.get_rank(group)
        here = experts // ranks
        counts = chosen_NE.sum(0)
        gathered = counts.new_empty(ranks * experts)
        dist.all_gather_into_tensor(gathered, counts, group=group)
        from_RE = gathered.view(ranks, experts)[:, me * here : (me + 1) * here]
        pairs = _pairs(chosen_NE, topk)
        counted = fetched(torch.cat((counts.view(ranks, here), from_RE)))
        received, rows = counted[ranks:].sum(1).tolist(), counted[ranks:].sum(0).tolist()
        groups = Groups(rows, from_RE.sum(0).cumsum(0).int())
        orders = _by_expert(from_RE, sum(received))
        return cls(group, *pairs, counted[:ranks].sum(1).tolist(), received, *orders, groups)


def fetched(counts: torch.Tensor) -> torch.Tensor:
    """``counts`` on the host: the one thing that it asks of the device in a half's forward pass of a layer."""
    return counts.cpu()


def _pairs(chosen_NE: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``row_P``, ``score_P`` and ``pair_NK``; their sizes are known without asking the device."""
    rows, experts = chosen_NE.shape
    device, pairs = chosen_NE.device, rows * topk
    number_NE = chosen_NE.T.flatten().cumsum(0).view(experts, rows).T - 1
    nth_NE = chosen_NE.cumsum(1) - 1 + torch.arange(rows, device=device)[:, None] * topk
    # What was not chosen goes to one place more, which is cut off.
    slot = torch.where(chosen_NE, nth_NE, pairs).flatten()
    number = torch.empty(pairs + 1, dtype=torch.int64, device=device).scatter_(0, slot, number_NE.flatten())[:-1]
    score = torch.empty(pairs + 1, dtype=torch.int64, device=device).scatter_(
        0, slot, torch.arange(rows * experts, device=device)
    )[:-1]
    score_P = torch.empty_like(score).scatter_(0, number, score)
    return score_P // experts, score_P, number.view(rows, topk)


def _by_expert(from_RE: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order by expert of pairs that come by rank, and by expert within a rank; and its inverse.

    Args:
        from_RE: [ranks, experts of this rank] pairs from each rank for each expert, on the device.
        pairs: all of them.
    """
    # Blocks of one rank's pairs for one expert stay together: each moves from where it came to where it belongs.
    begin_RE = (from_RE.flatten().cumsum(0) - from_RE.flatten()).view_as(from_RE)
    by_expert_ER = from_RE.T.contiguous()
    end = by_expert_ER.flatten().cumsum(0)
    shift = begin_RE.T.flatten() - (end - by_expert_ER.flatten())
    place = torch.arange(pairs, device=from_RE.device)
    order = place + shift.repeat_interleave(by_expert_ER.flatten(), output_size=pairs)
    return order, torch.empty_like(order).scatter_(0, order, place)
