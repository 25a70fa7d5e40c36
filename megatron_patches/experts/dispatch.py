"""The ways of rows that a router sends to experts on expert-parallel ranks, and back.

A row travels once to each rank that has one of its experts, however many these are. The sum of their outputs comes
back. Where almost every row has an expert on every rank, all rows go to all ranks. Then their numbers are known
beforehand, and hosts have to know only how many pairs of a row and an expert they compute. They ask their device for it
as soon as rows are routed, and read the answer when the rows have arrived.

Shape suffixes: N rows of this rank's nano-batch, G expert-parallel ranks, E experts, K experts of a row; S rows that
are sent, R rows that arrive, P pairs of a row that arrived and an expert of this rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.device.to_host import Question
from distca.models.experts import goes_everywhere
from distca.ops.expert_sums import expert_sums
from distca.ops.grouped_linear import Groups


@dataclass(frozen=True)
class _Pairs:
    """The pairs that this rank computes, by expert.

    Attributes:
        row_P: int64 number of a pair's row among those that arrived.
        slot_P: int64 its place in the flat experts of the rows that arrived.
        pair_RK: int64 the pair of each of a row's experts; P where another rank has it.
        groups: pairs of each expert.
    """

    row_P: torch.Tensor
    slot_P: torch.Tensor
    pair_RK: torch.Tensor
    groups: Groups


class Dispatch:
    """The way of one nano-batch's rows to experts.

    Args:
        expert_NK: int32 numbers of each row's experts.
        experts: number of the layer's experts.
        group: the expert-parallel ranks; rank r has the r-th part of all experts.
        question: [G, E] the rows of every expert on every rank. Where rows do not go everywhere, G columns follow with
            the rows that go to each rank.
        counts_GE: the same on the device.
        rows_G: rows of every rank, where they go everywhere.
        goes_NG: bool, which rows go to which rank; None for all to all.
        last_first: this rank's experts are computed in the reverse of their order.
    """

    def __init__(
        self,
        expert_NK: torch.Tensor,
        experts: int,
        group: dist.ProcessGroup,
        question: Question,
        counts_GE: torch.Tensor,
        rows_G: Sequence[int],
        goes_NG: torch.Tensor | None,
        last_first: bool,
    ) -> None:
        self._last_first = last_first
        self.group, self.expert_NK, self._question, self._counts_GE = group, expert_NK, question, counts_GE
        self._ranks, self._me = group.size(), dist.get_rank(group)
        self._here = experts // self._ranks
        self._pairs: _Pairs | None = None
        self._sent_row_S = self._place_NG = None
        if goes_NG is None:
            self.sent, self.received = [len(expert_NK)] * self._ranks, list(rows_G)
            return
        answer = question.read()
        self.sent, self.received = answer[self._me, experts:].tolist(), answer[:, experts + self._me].tolist()
        self._sent_row_S, self._place_NG = _places(goes_NG, sum(self.sent))

    @classmethod
    def of(
        cls,
        chosen_NE: torch.Tensor,
        topk: int,
        group: dist.ProcessGroup,
        rows_G: Sequence[int],
        last_first: bool = False,
    ) -> Dispatch:
        """Every rank of the group calls it together.

        Args:
            chosen_NE: bool, ``topk`` of each row true.
            topk: experts of a row.
            group: the expert-parallel ranks.
            rows_G: rows of each rank's nano-batch.
        """
        ranks, (rows, experts) = group.size(), chosen_NE.shape
        assert rows_G[dist.get_rank(group)] == rows
        counts, goes_NG = chosen_NE.sum(0), None
        if not goes_everywhere(ranks, topk):
            goes_NG = chosen_NE.view(rows, ranks, -1).any(2)
            counts = torch.cat((counts, goes_NG.sum(0)))
        gathered = counts.new_empty(ranks * len(counts))
        dist.all_gather_into_tensor(gathered, counts, group=group)
        counts_G = gathered.view(ranks, -1)
        question = asked(counts_G)
        numbers = _experts_of(chosen_NE, topk)
        return cls(numbers, experts, group, question, counts_G[:, :experts], rows_G, goes_NG, last_first)

    # What leaves this rank, and comes back.

    def spread(self, x_N: torch.Tensor) -> torch.Tensor:
        """[S, ...] rows by the rank that they go to."""
        if self._ranks == 1:
            return x_N
        if self._sent_row_S is None:
            return x_N.repeat(self._ranks, *[1] * (x_N.dim() - 1))
        return x_N[self._sent_row_S]

    def collected(self, x_S: torch.Tensor) -> torch.Tensor:
        """[N, ...] sums of what came back from the ranks that a row had gone to."""
        if self._ranks == 1:
            return x_S
        if self._place_NG is None:
            return x_S.view(self._ranks, -1, *x_S.shape[1:]).sum(0)
        return expert_sums(x_S, self._place_NG)

    # What arrives.

    @property
    def has_arrived(self) -> bool:
        """Whether this rank knows the experts of the rows that arrive."""
        return self._pairs is not None

    def arrive(self, expert_RK: torch.Tensor) -> None:
        """Take note of the experts of the rows that arrived."""
        own_GE = slice(self._me * self._here, (self._me + 1) * self._here)
        rows, counts_E = self._question.read()[:, own_GE].sum(0).tolist(), self._counts_GE[:, own_GE].sum(0)
        number = expert_RK.flatten() - own_GE.start
        is_own = (number >= 0) & (number < self._here)
        if self._last_first:
            rows, counts_E, number = rows[::-1], counts_E.flip(0), self._here - 1 - number
        groups = Groups(rows, counts_E.cumsum(0).int(), self._last_first)
        # Pairs of other ranks come last.
        number = torch.where(is_own, number, self._here)
        slot_P = number.sort(stable=True).indices[: sum(rows)]
        pair = torch.full_like(number, len(slot_P), dtype=torch.int64)
        pair.scatter_(0, slot_P, torch.arange(len(slot_P), device=pair.device))
        self._pairs = _Pairs(slot_P // expert_RK.shape[1], slot_P, pair.view_as(expert_RK), groups)

    @property
    def groups(self) -> Groups:
        """Pairs of each expert of this rank."""
        return self._known.groups

    def by_expert(self, x_R: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[P, ...] the rows of pairs, by expert."""
        return torch.index_select(x_R, 0, self._known.row_P, out=out)

    def factors(self, x_RK: torch.Tensor) -> torch.Tensor:
        """[P] the numbers of pairs, by expert."""
        return x_RK.flatten()[self._known.slot_P]

    def by_row(self, x_PH: torch.Tensor) -> torch.Tensor:
        """[R, H] sums over the pairs of each row."""
        return expert_sums(x_PH, self._known.pair_RK)

    def factors_by_row(self, x_P: torch.Tensor) -> torch.Tensor:
        """[R, K] the numbers of pairs at their rows' experts; 0 for those of other ranks."""
        pair_RK = self._known.pair_RK
        return x_P.new_zeros(pair_RK.numel()).scatter_(0, self._known.slot_P, x_P).view_as(pair_RK)

    @property
    def _known(self) -> _Pairs:
        assert self._pairs is not None, "rows have not arrived"
        return self._pairs


def asked(counts: torch.Tensor) -> Question:
    """The one question that a host asks its device in a nano-batch's forward pass of a layer."""
    return Question(counts)


def _experts_of(chosen_NE: torch.Tensor, topk: int) -> torch.Tensor:
    """[N, K] int32 numbers of the experts that are chosen; their number is known without asking the device."""
    rows, experts = chosen_NE.shape
    device = chosen_NE.device
    # The n-th chosen expert of a row goes to the row's n-th place; the others to one place more, which is cut off.
    place_NE = chosen_NE.cumsum(1) - 1 + torch.arange(rows, device=device)[:, None] * topk
    place = torch.where(chosen_NE, place_NE, rows * topk).flatten()
    number = torch.arange(experts, dtype=torch.int32, device=device).expand(rows, -1).flatten()
    return torch.empty(rows * topk + 1, dtype=torch.int32, device=device).scatter_(0, place, number)[:-1].view(rows, -1)


def _places(goes_NG: torch.Tensor, sent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[S] numbers of the rows that are sent, by rank and row; [N, G] where a row is among them, S where it is not."""
    rows, ranks = goes_NG.shape
    goes = goes_NG.T.flatten()
    place = torch.where(goes, goes.cumsum(0) - 1, sent)
    number = torch.arange(rows, device=goes.device).repeat(ranks)
    sent_row_S = torch.empty(sent + 1, dtype=torch.int64, device=goes.device).scatter_(0, place, number)[:-1]
    return sent_row_S, place.view(ranks, rows).T.contiguous()
