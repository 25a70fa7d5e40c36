"""A transport whose pool may break, because a rank of it is gone: the step goes on with zeros, and is then repeated.

A rank that stopped in the middle of a step would leave others waiting in collectives of other groups. So it goes on to
the end of the step: once an exchange has failed, only zeros arrive. The results of that step are thrown away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distca.cluster.pool_store import break_off, give_up
from distca.transport.collective import CollectiveHandle, CollectiveTransport
from distca.transport.interface import Part

logger = logging.getLogger(__name__)

_LOST = ("gloo/transport", "NCCL", "ncclRemoteError")
"""Words in the messages of errors that a rank which is gone causes."""


class PoolBrokenError(RuntimeError):
    """Raised where the pool was given up, because a rank of it is gone."""


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because a rank of its group is gone."""
    known = isinstance(error, (dist.DistError, PoolBrokenError))
    return known or any(word in str(error) for word in _LOST)


class BreakableTransport:
    """Rows by all-to-all over a process group that may be given up for another one.

    Args:
        goes_on: whether a step goes on with zeros when a rank is gone; otherwise an exchange raises its error.

    Attributes:
        broken: whether an exchange failed, or there is no group.
    """

    def __init__(self, goes_on: bool) -> None:
        self._goes_on = goes_on
        self._group: dist.ProcessGroup | None = None
        self._inner: CollectiveTransport | None = None
        self._ending = threading.Lock()
        self.name, self.rank, self.ranks, self.broken = "", 0, 0, True

    def use(self, group: dist.ProcessGroup) -> None:
        """Sends rows over ``group`` from now on, and none over the group before."""
        self.give_up()
        self._group, self._inner, self.broken = group, CollectiveTransport(group), False
        self.name, self.rank, self.ranks = self._inner.name, self._inner.rank, self._inner.ranks

    def give_up(self) -> None:
        """Drops the group and sends no rows any more; exchanges that are under way fail."""
        with self._ending:
            group, self._group, self._inner, self.broken = self._group, None, None, True
            if group is not None:
                give_up(group)

    def break_off(self) -> None:
        """Makes exchanges that are under way fail; may be called from another thread than the one that launches
        them."""
        with self._ending:
            self.broken = True
            if self._group is not None:
                break_off(self._group)

    def launch(self, parts: tuple[Part, ...]) -> BreakableHandle:
        """Starts an exchange.

        Raises:
            TransportError: the moves belong to a plan for another number of ranks; nothing was sent.
        """
        handle = None
        if self.broken:
            self.failed(PoolBrokenError("The pool was given up."))
        if self._inner is not None:
            try:
                handle = self._inner.launch(parts)
            except RuntimeError as error:
                self.failed(error)
        return BreakableHandle(self, handle, parts)

    def failed(self, error: RuntimeError) -> None:
        """Gives the pool up where an exchange failed because a rank is gone.

        Raises:
            RuntimeError: the ``error`` itself, where it has another cause, or steps do not go on.
        """
        if not self._goes_on or not (self.broken or is_lost_peer(error)):
            raise error
        logger.debug("An exchange of rows failed: %s", error)
        error.__traceback__ = None  # its frames hold the group, whose connections tell others
        self.give_up()

    def came_to_end(self, device: torch.device) -> bool:
        """Whether all ranks of the group have come to the end of a step with all exchanges done; all ranks ask.

        It waits for the device, on which exchanges that were broken off end too.

        Raises:
            RuntimeError: they have not, and this rank's steps do not go on.
        """
        here = torch.ones(1, device=device)
        try:
            if self.broken or self._group is None:
                self.failed(PoolBrokenError("The pool was given up."))
                return False
            dist.all_reduce(here, group=self._group)
            # A reduction that NCCL breaks off leaves any number.
            whole = here.item() == self.ranks and not self.broken
        except RuntimeError as error:
            self.failed(error)
            return False
        if not whole:
            self.failed(PoolBrokenError("The pool was given up."))
        return whole


class BreakableHandle:
    """An exchange under way, or one that failed and only fills destinations with zeros.

    Attributes:
        works: pending collectives, for whoever records when they end.
    """

    def __init__(self, transport: BreakableTransport, handle: CollectiveHandle | None, parts: tuple[Part, ...]) -> None:
        self._transport, self._handle, self._parts = transport, handle, parts

    @property
    def works(self) -> list[Any]:
        return [] if self._handle is None else self._handle.works

    def tell(self, ended: Callable[[], None]) -> None:
        """See :meth:`distca.transport.collective.CollectiveHandle.tell`."""
        if self._handle is not None:
            self._handle.tell(ended)

    def wait(self) -> None:
        if self._handle is not None:
            try:
                self._handle.wait()
            except RuntimeError as error:
                self._transport.failed(error)
        if self._transport.broken:
            for part in self._parts:
                part.destination.zero_()
        self._handle, self._parts = None, ()
