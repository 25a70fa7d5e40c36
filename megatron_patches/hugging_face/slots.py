"""Links between the parameters of a model and the tensors of a folder that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

import torch

from distca.models.tensors import TensorFiles


class Slot(Protocol):
    """The link between a parameter and the tensors of a folder that it is made of.

    Attributes:
        names: names of the folder's tensors.
        by_expert: whether its shares are those of expert-parallel ranks; else they are those of tensor-parallel ones.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def by_expert(self) -> bool: ...

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        """Returns the share of the parameter on one of ``ranks`` ranks, in the files' type."""
        ...

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns the folder's tensors, in the order of ``names``, from all ranks' shares."""
        ...


@dataclass(frozen=True)
class Whole:
    """A parameter that all ranks have alike: a norm's weight, a projection to latent rows, or a bias that is added to
    the sum over ranks."""

    names: tuple[str, ...]
    by_expert = False

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        return files.read(self.names[0])

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (shares[0],)


@dataclass(frozen=True)
class Vocabulary:
    """A parameter with a row for each token id, padded with rows of zeros to a multiple of the ranks."""

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
    """A parameter of several parts, such as gate and up, of which each rank has its rows of every part.

    Attributes:
        parts: by tensor of the folder, the rows of the parts that it holds, one after the other.
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
    """A parameter like :class:`Rows`, of which the folder has the parts of each head together.

    Attributes:
        parts: by tensor of the folder, the rows of its parts, of all heads together.
        heads: number of heads of all ranks.
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
        """Returns the rows of the parts of one head, by tensor."""
        return [[size // self.heads for size in sizes] for sizes in self.parts]


@dataclass(frozen=True)
class Columns:
    """The weight of a projection whose inputs are divided over ranks."""

    names: tuple[str, ...]
    columns: int
    by_expert = False

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        own = self.columns // ranks
        return files.read(self.names[0], slice(None), slice(rank * own, (rank + 1) * own))

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (torch.cat(list(shares), dim=1),)


def _rows(files: TensorFiles, names: Sequence[str], sizes: Sequence[int], part: int, rows: slice) -> torch.Tensor:
    """Returns rows of a part, which is a tensor of its own, or lies behind other parts in a single tensor."""
    if len(names) == len(sizes):
        return files.read(names[part], rows)
    skipped = sum(sizes[:part])
    return files.read(names[0], slice(skipped + rows.start, skipped + rows.stop))


def _stored(names: Sequence[str], parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that hold these parts: one for each, or a single one."""
    return tuple(parts) if len(names) == len(parts) else (torch.cat(list(parts)),)


@dataclass(frozen=True)
class QueryKeyValue:
    """The weight or bias of the QKV projection. For each group it has the query heads, the key and the value.

    Attributes:
        queries: query heads of a group.
        groups: number of groups of all ranks.
        head_dim: rows of a head.
        gated: whether each query head has an output gate. In the folder it follows its head; here the gates follow all
            query heads of their group.
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
        """Returns [groups, rows, ...] rows with query heads and gates in the other order."""
        return rows.unflatten(1, (*order, self.head_dim)).transpose(1, 2).flatten(1, 3)

    def _widths(self) -> list[int]:
        """Returns the rows of a group in q, in k and in v."""
        return [heads * self.head_dim for heads in (self.queries * (1 + self.gated), 1, 1)]


@dataclass(frozen=True)
class InputFirst:
    """A projection of an expert, or its bias, whose first dimension in the folder is that of the inputs.

    Attributes:
        in_turn: whether the folder has outputs of the gate and of the up projection in turn; here all of the gate come
            first.
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
class InPlace:
    """A weight of an expert, one for each expert-parallel rank: that of the expert with this number on the rank.

    Attributes:
        each: by expert-parallel rank, the slot of its expert's weight.
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
