"""Computes a rank's pieces of a recurrent layer, and the states between pieces, for ``recurrent_call.py``.

- piece: a range of a document's rows on one rank in one nano-batch.
- summary: a piece turns the state S before it into A·S + B. The *transition* A and the *own state* B are its summary.

Shape suffixes: N rows of this rank, H heads, V elements of a head of v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distca.recurrent import CoreRows, RecurrentKernel, carried
from distca.runtime.recurrent_routes import RecurrentRoutes, StateRoutes

States = Mapping[int, torch.Tensor]
"""States or their gradients, by the index of a piece on this rank or by the index of a document."""


class RankPieces:
    """This rank's pieces of one nano-batch, and the kernel that computes them.

    Attributes:
        rows: how many rows the pieces have together. They follow each other from row 0 on, and padding follows them.
        only, first, inner, last: indices of pieces, by their place in their documents. An ``only`` piece is a whole
            document.
    """

    def __init__(self, routes: RecurrentRoutes, kernel: RecurrentKernel) -> None:
        self._spans, self._kernel = routes.pieces.spans, kernel
        self.rows = self._spans[-1][1] if self._spans else 0
        assert self.rows == sum(end - begin for begin, end in self._spans), "rows between pieces would never be written"
        places = list(zip(routes.opens, routes.closes, strict=True))
        self.only = [n for n, each in enumerate(places) if each == (True, True)]
        self.first = [n for n, each in enumerate(places) if each == (True, False)]
        self.inner = [n for n, each in enumerate(places) if each == (False, False)]
        self.last = [n for n, each in enumerate(places) if each == (False, True)]

    def forward(
        self, rows: CoreRows, numbers: Sequence[int], states: States, o_NHV: torch.Tensor, wanted: bool = True
    ) -> torch.Tensor:
        """Computes the pieces ``numbers`` from the ``states`` before them.

        ``states`` has all of these pieces or none; with none, they begin with zeros. Writes o into ``o_NHV``; returns
        the states behind the pieces if ``wanted``."""
        return self._kernel.forward(rows, self._spans_of(numbers), _stacked(states, numbers), o_NHV, wanted)

    def backward(
        self,
        rows: CoreRows,
        numbers: Sequence[int],
        states: States,
        do_NHV: torch.Tensor,
        behind: States,
        gradients: CoreRows,
        wanted: bool = True,
    ) -> torch.Tensor:
        """Runs backward of the pieces ``numbers``, and writes gradients of their rows into ``gradients``.

        ``states`` are before the pieces, and ``behind`` has gradients of the states behind the pieces. Returns the
        gradients of ``states`` if ``wanted``."""
        both = _stacked(states, numbers), _stacked(behind, numbers)
        return self._kernel.backward(rows, self._spans_of(numbers), both[0], do_NHV, both[1], gradients, wanted)

    def inner_summaries(self, rows: CoreRows) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Returns the own states and the transitions of inner pieces."""
        own, transitions = self._kernel.summaries(rows, self._spans_of(self.inner))
        return dict(zip(self.inner, own, strict=True)), dict(zip(self.inner, transitions, strict=True))

    def inner_state_gradients(self, rows: CoreRows, do_NHV: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns the gradients of the states before inner pieces, from the gradients of these pieces' o alone."""
        found = self._kernel.state_gradients(rows, self._spans_of(self.inner), do_NHV)
        return dict(zip(self.inner, found, strict=True))

    def _spans_of(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        return [self._spans[each] for each in numbers]


def _stacked(states: States, numbers: Sequence[int]) -> torch.Tensor | None:
    has_states = bool(numbers) and numbers[0] in states
    return torch.stack([states[each] for each in numbers]) if has_states else None


def states_before(
    arrived: Sequence[torch.Tensor], routes: StateRoutes, passed: States, backward: bool
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Computes states from the summaries that arrived: S ← A·S + B, piece after piece of each document.

    In ``backward``, S is the gradient of a state, Aᵀ takes the place of A, and the pieces are in reverse order.

    Args:
        arrived: a tensor of own states and a tensor of transitions, with one of a piece in each row.
        routes: gives each piece's rows in these tensors (:class:`distca.plan.recurrent.chains.Link`).
        passed: by document, S behind its pieces in the nano-batch that was computed before this one.

    Returns:
        Two dicts. The first has S before each of this rank's pieces, by piece. A document's first piece (in
        ``backward``, its last) is left out, since S is 0 before it. The second has S behind this nano-batch, by
        document, if this rank has a piece of the document in the nano-batch that is computed next.
    """
    states, transitions = arrived
    found: dict[int, torch.Tensor] = {}
    goes_on: dict[int, torch.Tensor] = {}
    for document, links in routes.chains:
        reached = passed.get(document)
        for link in links:
            if link.piece >= 0:
                assert reached is not None, "no state arrived for a piece that continues a document"
                found[link.piece] = reached
            if link.state >= 0:
                own = states[link.state]
                if link.transition >= 0:
                    assert reached is not None
                    reached = own + carried(transitions[link.transition], reached, backward)
                else:
                    reached = own.clone()  # a view would keep the whole receive tensor alive
        # B of the last link arrives only if this rank has a piece of the document in the other nano-batch.
        if reached is not None and links[-1].state >= 0:
            goes_on[document] = reached
    return found, goes_on
