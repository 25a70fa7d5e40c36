"""The order in which documents are trained on: endless epochs, packed into micro-batches. Only lengths decide it."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distca.errors import DataError

WINDOW = 64


@dataclass(frozen=True)
class MicroBatch:
    """The documents of one micro-batch, over all ranks. Array legend: D documents; all arrays are int64.

    Attributes:
        documents: [D] their ids in the DocumentSet. A set smaller than a micro-batch is repeated within it.
        lengths: [D] tokens per document.
        rank_of: [D] home rank of each document where documents stay whole, else None.
    """

    documents: np.ndarray
    lengths: np.ndarray
    rank_of: np.ndarray | None

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())


class Sampler:
    """Deals documents into global batches: every document exactly once per epoch, shuffled anew in each.

    Documents are dealt in shuffled order. One that does not fit into what is left of a micro-batch waits, while later
    ones are tried, until WINDOW documents wait; those are dealt first into the next micro-batch, so none waits long and
    none is lost. The end of an epoch shares a micro-batch with the beginning of the next.

    The same arguments give the same batches on every rank, without communication.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        ranks: int,
        tokens_per_rank: int,
        micro_batches: int,
        seed: int,
        whole: bool = False,
    ) -> None:
        """Prepare the first epoch.

        Args:
            lengths: [D] tokens per document.
            ranks: home ranks that share a micro-batch.
            tokens_per_rank: most tokens a rank holds of one micro-batch.
            micro_batches: micro-batches of a global batch.
            seed: of the shuffles.
            whole: keep every document on one rank. Otherwise a micro-batch is filled to ranks × tokens_per_rank tokens
                and its documents may span ranks.

        Raises:
            DataError: if there is no document, a count is below 1, the seed negative, or a document does not fit.
        """
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._micro_batches = micro_batches
        self._seed = seed
        self._whole = whole
        self._bins = ranks if whole else 1
        self._capacity = tokens_per_rank if whole else ranks * tokens_per_rank
        self._check(ranks, tokens_per_rank)
        self._window = min(WINDOW, len(self._lengths))
        self._waiting: list[int] = []
        self._epoch = 0
        self._cursor = 0
        self._order = shuffled(len(self._lengths), seed, 0)
        self._digest = hashlib.sha256(self._lengths.tobytes()).hexdigest()

    @property
    def epoch(self) -> int:
        """The epoch that the next document is drawn from, beginning with 0."""
        return self._epoch

    def next(self) -> tuple[MicroBatch, ...]:
        """The micro-batches of the next global batch."""
        return tuple(self._fill() for _ in range(self._micro_batches))

    def state_dict(self) -> dict[str, Any]:
        """Returns the sampler's position in the data, as JSON-able numbers; its size does not grow with the corpus."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "waiting": list(self._waiting),
            "seed": self._seed,
            "documents": len(self._lengths),
            "tokens": int(self._lengths.sum()),
            "lengths": self._digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``state`` was taken. Ranks, tokens_per_rank and micro_batches may have changed.

        Raises:
            DataError: if the state belongs to another set of documents or another seed.
        """
        own = self.state_dict()
        if state.get("lengths", own["lengths"]) != own["lengths"] and state["tokens"] == own["tokens"]:
            raise DataError(
                f"The {own['documents']} documents are in another order than when the checkpoint was saved, or cut "
                "otherwise: resuming would repeat or skip some; restore `path` and the other data settings, or "
                "start a new run."
            )
        for name, setting in (("documents", "`path`"), ("tokens", "`path`"), ("seed", "`seed`")):
            if state[name] != own[name]:
                raise DataError(
                    f"The saved sampler had {name} {state[name]}, now it is {own[name]}: resuming would repeat or skip "
                    f"documents; restore {setting} and the other data settings, or start a new run."
                )
        self._epoch, self._cursor = int(state["epoch"]), int(state["cursor"])
        self._waiting = [int(document) for document in state["waiting"]]
        self._order = shuffled(len(self._lengths), self._seed, self._epoch)

    def _check(self, ranks: int, tokens_per_rank: int) -> None:
        counts = {"ranks": ranks, "`tokens_per_rank`": tokens_per_rank, "`micro_batches`": self._micro_batches}
        for name, count in counts.items():
            if count < 1:
                raise DataError(f"{name} is at least 1, not {count}.")
        if len(self._lengths) == 0:
            raise DataError("There is no document to train on; set `path` to a source that has some.")
        longest = int(self._lengths.max())
        if longest > self._capacity:
            room = "one rank" if self._whole else f"a micro-batch of {ranks} ranks × {tokens_per_rank:,} tokens"
            raise DataError(
                f"A document of {longest:,} tokens does not fit into {room}, which holds {self._capacity:,} tokens; "
                "raise `tokens_per_rank`, or lower `context_length` and set `longer` to split."
            )

    def _fill(self) -> MicroBatch:
        room = _Room(self._bins, self._capacity)
        taken: list[int] = []
        homes: list[int] = []
        waiting: list[int] = []
        held = iter(self._waiting)
        while room.left and len(waiting) < self._window:
            document = next(held, None)
            if document is None:
                document = self._draw()
            home = room.take(int(self._lengths[document]))
            if home is None:
                waiting.append(document)
            else:
                taken.append(document)
                homes.append(home)
        self._waiting = [*waiting, *held]
        documents = np.array(taken, dtype=np.int64)
        rank_of = np.array(homes, dtype=np.int64) if self._whole else None
        return MicroBatch(documents, self._lengths[documents], rank_of)

    def _draw(self) -> int:
        """The next document of the shuffled epochs."""
        if self._cursor == len(self._order):
            self._epoch += 1
            self._cursor = 0
            self._order = shuffled(len(self._lengths), self._seed, self._epoch)
        self._cursor += 1
        return int(self._order[self._cursor - 1])


class _Room:
    """Free tokens of equal bins; a document goes to the fullest bin that still takes it (best fit)."""

    def __init__(self, bins: int, capacity: int) -> None:
        self._free = [(capacity, index) for index in range(bins)]
        self.left = bins * capacity

    def take(self, length: int) -> int | None:
        """The bin that ``length`` tokens were put in, or None if they fit nowhere."""
        best = bisect_left(self._free, (length, -1))
        if best == len(self._free):
            return None
        free, index = self._free.pop(best)
        insort(self._free, (free - length, index))
        self.left -= length
        return index


def shuffled(count: int, *entropy: int) -> np.ndarray:
    """A permutation of ``range(count)`` that depends on ``entropy`` alone.

    numpy promises that the raw stream of a bit generator never changes, but not that ``Generator.permutation`` keeps
    its algorithm. A run that resumes on another numpy must see the same order, so the raw stream is sorted instead.

    Args:
        count: number of items.
        entropy: non-negative integers, such as a seed and an epoch.

    Returns:
        [count] int64.

    Raises:
        DataError: on a negative seed.
    """
    if min(entropy) < 0:
        raise DataError(f"A seed is 0 or more, not {min(entropy)}; change `seed`.")
    keys = np.random.PCG64(list(entropy)).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)
