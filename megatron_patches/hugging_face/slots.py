"""Converts tensors of a Hugging Face folder to parameters of Megatron, and back.

A *slot* links one parameter to tensors of the folder. A rank's *share* is what it holds of the parameter: all of it, a
tensor-parallel part, or the parameter of its own expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

import torch

from distca.models.tensors import TensorFiles


class Slot(Protocol):
    """The link between a parameter and tensors of a folder.

    Attributes:
        names: names of the folder's tensors.
        by_expert: True if expert-parallel ranks have the shares, and False if tensor-parallel ranks have them.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def by_expert(self) -> bool: ...

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        """Reads the share of rank number ``rank`` of ``ranks`` from the folder, in the files' dtype."""
        ...

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Makes the folder's tensors, in the order of ``names``, from the shares of all ranks, in order."""
        ...


@dataclass(frozen=True)
class Whole:
    """A parameter of which every rank has a copy, for example a norm's weight."""

    names: tuple[str, ...]
    by_expert = False

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        return files.read(self.names[0])

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (shares[0],)


@dataclass(frozen=True)
class Vocabulary:
    """The embedding or the output layer, with a row for each of ``vocabulary`` token ids.

    All ranks have equally many rows, so the last ranks' shares may end in rows of zeros.
    """

    names: tuple[str, ...]
    vocabulary: int
    by_expert = False

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        rows = -(-self.vocabulary // ranks)
        first, last = (min((rank + more) * rows, self.vocabulary) for more in (0, 1))
        real = files.read(self.names[0], slice(first, last))
        return real if len(real) == rows else torch.nn.functional.pad(real, (0, 0, 0, rows - len(real)))

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (torch.cat(list(shares))[: self.vocabulary],)


@dataclass(frozen=True)
class Rows:
    """A parameter whose rows form one or more parts, such as gate and up projection. Each rank has rows of every part.

    Example: gate and up projection have 4 rows each. The share of the first of two ranks is rows 0, 1, 4 and 5.

    Attributes:
        parts: number of rows of each part, by tensor in ``names``. In the example, ((4, 4),) is for a folder with one
            tensor of both parts, and ((4,), (4,)) for a folder with two tensors.
    """

    names: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    by_expert = False

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        shares = []
        for name, sizes in zip(self.names, self.parts, strict=True):
            for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
                own = size // ranks
                shares.append(files.read(name, slice(begin + rank * own, begin + (rank + 1) * own)))
        return torch.cat(shares)

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        own = [size // len(shares) for sizes in self.parts for size in sizes]
        whole = iter([torch.cat(cut) for cut in zip(*(share.split(own) for share in shares), strict=True)])
        return tuple(torch.cat(list(islice(whole, len(sizes)))) for sizes in self.parts)


@dataclass(frozen=True)
class HeadRows:
    """A parameter whose rows form parts, such as queries and keys. Each head has rows of every part.

    Example: with parts a and b and heads 0 and 1, the folder's rows are a0 b0 a1 b1 and Megatron's are a0 a1 b0 b1.

    Attributes:
        parts: number of rows of each part, over all heads, by tensor in ``names``.
        heads: number of heads on all ranks together.
    """

    names: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    heads: int
    by_expert = False

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        own, shares = self.heads // ranks, []
        for name, sizes in zip(self.names, self._of_head(), strict=True):
            rows = files.read(name, slice(rank * own * sum(sizes), (rank + 1) * own * sum(sizes)))
            shares += [part.flatten(0, 1) for part in rows.unflatten(0, (own, -1)).split(sizes, dim=1)]
        return torch.cat(shares)

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        whole = Rows(self.names, self.parts).tensors(shares)
        return tuple(
            torch.cat([part.unflatten(0, (self.heads, -1)) for part in tensor.split(sizes)], dim=1).flatten(0, 1)
            for tensor, sizes in zip(whole, self.parts, strict=True)
        )

    def _of_head(self) -> list[list[int]]:
        return [[size // self.heads for size in sizes] for sizes in self.parts]


@dataclass(frozen=True)
class Columns:
    """The weight of a projection whose ``columns`` columns are divided over ranks."""

    names: tuple[str, ...]
    columns: int
    by_expert = False

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        own = self.columns // ranks
        return files.read(self.names[0], slice(None), slice(rank * own, (rank + 1) * own))

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (torch.cat(list(shares), dim=1),)


def _rows(files: TensorFiles, names: Sequence[str], sizes: Sequence[int], part: int, rows: slice) -> torch.Tensor:
    """Reads rows of part number ``part`` (from 0) from the folder; ``rows`` is counted from the part's first row.

    ``names`` has the name of each part's tensor, or of a single tensor with all parts in order. ``sizes`` are the
    numbers of rows of all parts.
    """
    if len(names) == len(sizes):
        return files.read(names[part], rows)
    skipped = sum(sizes[:part])
    return files.read(names[0], slice(skipped + rows.start, skipped + rows.stop))


def _stored(names: Sequence[str], parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(parts) if len(names) == len(parts) else (torch.cat(list(parts)),)


@dataclass(frozen=True)
class QueryKeyValue:
    """The weight or bias of the QKV projection.

    A *group* is a key/value head with its query heads. A folder has the rows of all queries, then of all keys, then of
    all values. Megatron has one group after the other, each with its query heads, key and value.

    Attributes:
        queries: number of query heads in a group.
        groups: number of groups on all ranks together.
        head_dim: number of rows of a head.
        gated: whether each query head has an output gate. In a folder each query head is followed by its gate. In
            Megatron all gates of a group follow all its query heads.
    """

    names: tuple[str, ...]
    queries: int
    groups: int
    head_dim: int
    gated: bool = False
    by_expert = False

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        own, widths = self.groups // ranks, self._widths()
        sizes, parts = [self.groups * width for width in widths], []
        for number, width in enumerate(widths):
            rows = slice(rank * own * width, (rank + 1) * own * width)
            parts.append(_rows(files, self.names, sizes, number, rows).unflatten(0, (own, width)))
        parts[0] = self._regrouped(parts[0], (self.queries, 1 + self.gated))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        widths = self._widths()
        groups = torch.cat([share.unflatten(0, (-1, sum(widths))) for share in shares])
        q, k, v = groups.split(widths, dim=1)
        q = self._regrouped(q, (1 + self.gated, self.queries))
        return _stored(self.names, [part.flatten(0, 1) for part in (q, k, v)])

    def _regrouped(self, rows: torch.Tensor, order: tuple[int, int]) -> torch.Tensor:
        """Turns rows [groups, order[0] · order[1] · head_dim, ...] into [groups, order[1] · order[0] · head_dim, ...].

        ``order`` is (query heads, 2) for rows of a folder, and (2, query heads) for Megatron's; without gates, 1 takes
        the place of 2.
        """
        return rows.unflatten(1, (*order, self.head_dim)).transpose(1, 2).flatten(1, 3)

    def _widths(self) -> list[int]:
        return [heads * self.head_dim for heads in (self.queries * (1 + self.gated), 1, 1)]


@dataclass(frozen=True)
class InputFirst:
    """The weight of an expert's projection, stored in the folder as [inputs, outputs], or the projection's bias.

    Attributes:
        in_turn: whether the folder's outputs alternate between gate and up projection. In Megatron, all outputs of the
            gate projection come before those of the up projection.
    """

    names: tuple[str, ...]
    in_turn: bool
    by_expert = False

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        rows = files.read(self.names[0])
        rows = rows.t() if rows.dim() == 2 else rows
        return torch.cat((rows[::2], rows[1::2])) if self.in_turn else rows

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        (rows,) = shares
        rows = torch.stack(rows.chunk(2), dim=1).flatten(0, 1) if self.in_turn else rows
        return (rows.t() if rows.dim() == 2 else rows,)


@dataclass(frozen=True)
class ExpertOfEachRank:
    """A parameter of the n-th expert on each expert-parallel rank.

    Example: the first rank has the experts 0 and 1, and the second 2 and 3. For n = 1, counted from 0, the slot is for
    the experts 1 and 3.

    Attributes:
        each: the slot of each expert-parallel rank's parameter.
    """

    each: tuple[Slot, ...]
    by_expert = True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for slot in self.each for name in slot.names)

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        return self.each[rank].share(files, 0, 1)

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        each = zip(self.each, shares, strict=True)
        return tuple(tensor for slot, share in each for tensor in slot.tensors([share]))
