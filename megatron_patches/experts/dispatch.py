"""Makes the indices with which rows are sent to their experts' ranks, sorted by expert there, and their results summed.

A layer's experts are divided over the expert-parallel ranks, and a router chose K experts for each row (a token's
hidden vector). A row is sent once to each rank that has any of its experts. There the row makes a *pair* with each of
its experts on that rank, and the sum of these pairs' outputs is sent back. If nearly all rows would go to all ranks,
every row is sent to every rank. In other cases the host first waits until the device has counted the rows to send.

Shape suffixes: N rows of this rank, G expert-parallel ranks, E experts, K experts of a row, H hidden, P pairs of this
rank. R rows arrive from all ranks. S rows are sent by this rank; a row that goes to two ranks counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import torch.distributed as dist

from distca.device.to_host import Question
from distca.models.experts import goes_everywhere
from distca.ops.expert_numbers import expert_numbers
from distca.ops.grouped_linear import Groups
from distca.ops.row_sums import expert_sums


@dataclass(frozen=True)
class _Pairs:
    """The pairs of row and expert that this rank computes, sorted by expert.

    Example: this rank has experts 2 and 3, and three rows arrive with experts (0, 2), (3, 2) and (1, 3). There are four
    pairs: rows 0 and 1 at expert 2, then rows 1 and 2 at expert 3. So ``row_P``, each pair's row, is 0, 1, 1, 2.
    ``slot_P``, each pair's index in a flattened [R, K] tensor, is 1, 3, 2, 5. ``pair_RK``, the pair of each row and
    expert, is (4, 0), (2, 1), (4, 3). Here 4, which is P, stands for an expert of another rank. Indices are int64.
    """

    row_P: torch.Tensor
    slot_P: torch.Tensor
    pair_RK: torch.Tensor
    groups: Groups


class Dispatch:
    """The indices for one call of a layer with experts; :meth:`of` makes them.

    Args:
        expert_NK: int32 numbers of each row's experts.
        experts: E.
        group: the expert-parallel ranks. Rank 0 has the first E / G experts, rank 1 the next, and so on.
        question: a copy to the host of [G, E] numbers of rows that each rank has for each expert. With ``goes_NG`` it
            is [G, E + G]: numbers of rows that each rank sends to each rank follow.
        rows_G: number of rows of each rank.
        goes_NG: bool, whether a row is sent to a rank; None if all rows are sent to all ranks.
    """

    def __init__(
        self,
        expert_NK: torch.Tensor,
        experts: int,
        group: dist.ProcessGroup,
        question: Question,
        rows_G: Sequence[int],
        goes_NG: torch.Tensor | None,
    ) -> None:
        self.group, self.expert_NK, self._question, self._experts = group, expert_NK, question, experts
        self._ranks, self._me = group.size(), dist.get_rank(group)
        self._pairs: _Pairs | None = None
        self._sent_row_S: torch.Tensor | None = None
        self._place_NG: torch.Tensor | None = None  # where each row's result from each rank is; None with one rank
        if goes_NG is None:
            rows = len(expert_NK)
            self.sent, self.received = [rows] * self._ranks, list(rows_G)
            if self._ranks > 1:
                self._place_NG = _places_of_all(rows, self._ranks, expert_NK.device)
            return
        answer = question.read()
        self.sent, self.received = answer[self._me, experts:].tolist(), answer[:, experts + self._me].tolist()
        self._sent_row_S, self._place_NG = _places(goes_NG, sum(self.sent))

    @classmethod
    def of(cls, chosen_NE: torch.Tensor, topk: int, group: dist.ProcessGroup, rows_G: Sequence[int]) -> Dispatch:
        """Counts rows, and returns the indices. All ranks of the group must call this method together.

        ``chosen_NE`` is bool: true for the K = ``topk`` experts of each row.
        """
        ranks, (rows, experts) = group.size(), chosen_NE.shape
        assert rows_G[dist.get_rank(group)] == rows
        counts, goes_NG = chosen_NE.sum(0), None
        if not goes_everywhere(ranks, topk):
            goes_NG = chosen_NE.view(rows, ranks, experts // ranks).any(2)
            counts = torch.cat((counts, goes_NG.sum(0)))
        gathered = counts.new_empty(ranks * len(counts))
        dist.all_gather_into_tensor(gathered, counts, group=group)
        question = asked(gathered.view(ranks, -1))
        numbers = expert_numbers(chosen_NE.contiguous(), topk)
        return cls(numbers, experts, group, question, rows_G, goes_NG)

    @property
    def goes_everywhere(self) -> bool:
        """Whether all rows are sent to all ranks."""
        return self._sent_row_S is None

    def spread(self, x_N: torch.Tensor) -> torch.Tensor:
        """Returns [S, ...] the rows to send, sorted by receiving rank."""
        if self._sent_row_S is None:
            return x_N.repeat(self._ranks, *[1] * (x_N.dim() - 1))
        return x_N[self._sent_row_S]

    def collected(self, x_S: torch.Tensor) -> torch.Tensor:
        """Returns [N, ...] each row's sum of the results from the ranks to which the row was sent."""
        return x_S if self._place_NG is None else expert_sums(x_S, self._place_NG)

    @property
    def has_arrived(self) -> bool:
        return self._pairs is not None

    def arrive(self, expert_RK: torch.Tensor, last_first: bool = False) -> None:
        """Sorts the arrived rows by expert.

        Args:
            expert_RK: int32 numbers of their experts, from 0 to E - 1.
            last_first: whether pairs of this rank's last expert come first (``grouped.py`` has the reason).
        """
        here = self._experts // self._ranks
        own = slice(self._me * here, (self._me + 1) * here)
        rows: list[int] = self._question.read()[:, own].sum(0).tolist()
        rows = rows[::-1] if last_first else rows
        place_E, places = _places_of_experts(self._experts, own.start, here, last_first, expert_RK.device)
        place, slot = place_E.index_select(0, expert_RK.flatten()).sort(stable=True)
        groups = Groups(rows, torch.searchsorted(place, places, right=True, out_int32=True))
        slot_P = slot[: sum(rows)]  # without other ranks' experts, which come last
        pair = torch.full_like(slot, len(slot_P))
        pair.scatter_(0, slot_P, torch.arange(len(slot_P), device=pair.device))
        self._pairs = _Pairs(slot_P // expert_RK.shape[1], slot_P, pair.view_as(expert_RK), groups)

    @property
    def groups(self) -> Groups:
        return self._known.groups

    def by_expert(self, x_R: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [P, ...] the row of each pair."""
        return torch.index_select(x_R, 0, self._known.row_P, out=out)

    def factors(self, x_RK: torch.Tensor) -> torch.Tensor:
        """Returns [P] each pair's element of ``x_RK``, for example the pair's probability."""
        return x_RK.flatten()[self._known.slot_P]

    def by_row(self, x_PH: torch.Tensor) -> torch.Tensor:
        """Returns [R, H] the sum over each arrived row's pairs."""
        return expert_sums(x_PH, self._known.pair_RK)

    def factors_by_row(self, x_P: torch.Tensor) -> torch.Tensor:
        """Undoes :meth:`factors`: returns [R, K], with 0 for other ranks' experts."""
        pair_RK = self._known.pair_RK
        return x_P.new_zeros(pair_RK.numel()).scatter_(0, self._known.slot_P, x_P).view_as(pair_RK)

    @property
    def _known(self) -> _Pairs:
        assert self._pairs is not None, "rows have not arrived"
        return self._pairs


def asked(counts: torch.Tensor) -> Question:
    """Begins to copy counts to the host. Tests replace this function."""
    return Question(counts)


@cache
def _places_of_experts(
    experts: int, first: int, here: int, last_first: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [E] each expert's place in the order in which this rank computes experts, and [here] all places.

    The rank has ``here`` experts from number ``first`` on, with places from 0 to here - 1. With ``last_first`` its last
    expert has place 0. Other ranks' experts have place ``here``. Example: with experts 2 and 3 of four here, places are
    2, 2, 0, 1, or 2, 2, 1, 0 with ``last_first``.
    """
    narrow = torch.uint8 if here < 256 else torch.int32  # a sort takes as many passes as a number has bytes
    places = torch.arange(here, device=device)
    place_E = torch.full((experts,), here, device=device)
    place_E[first : first + here] = places.flip(0) if last_first else places
    return place_E.to(narrow), places.to(narrow)


@lru_cache(maxsize=2)  # a micro-batch's two nano-batches may have different numbers of rows
def _places_of_all(rows: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Returns [N, G] where each row's result from each rank is, if all rows are sent to all ranks."""
    return torch.arange(ranks * rows, device=device).view(ranks, rows).T.contiguous()


def _places(goes_NG: torch.Tensor, sent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [S] the rows to send, sorted by receiving rank, and [N, G] where each row is in this list.

    Example: rows 0 and 2 are sent to rank 0, and rows 0 and 1 to rank 1. The list is 0, 2, 0, 1, and the places are
    (0, 2), (4, 3), (1, 4). Here 4, which is S, stands for a row that is not sent to a rank.
    """
    rows, ranks = goes_NG.shape
    goes = goes_NG.T.flatten()
    place = torch.where(goes, goes.cumsum(0) - 1, sent)
    number = torch.arange(rows, device=goes.device).repeat(ranks)
    sent_row_S = torch.empty(sent + 1, dtype=torch.int64, device=goes.device).scatter_(0, place, number)[:-1]
    return sent_row_S, place.view(ranks, rows).T.contiguous()
