"""A transport between ranks that train (*homes*) and processes without a model that compute attention (*servers*).

If a server dies, exchanges of rows fail. Homes do not stop, because other homes would wait for them in Megatron's
collectives. They run the step to its end with wrong rows in place of the rows that failed to come: zeros, or with NCCL
perhaps any numbers. After the step, :meth:`BreakableTransport.came_to_end` returns False, and homes repeat the step
without the dead server.
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
"""If another rank of the group is gone, a collective's error message has one of these texts."""


class PoolBrokenError(RuntimeError):
    """The process group is broken, or this rank has left it, so this rank cannot exchange rows."""

    def __init__(self) -> None:
        super().__init__("The group of ranks that exchange rows is broken, or this rank has left it.")


def is_lost_peer(error: RuntimeError) -> bool:
    known = isinstance(error, (dist.DistError, PoolBrokenError))
    return known or any(word in str(error) for word in _LOST)


class BreakableTransport:
    """A :class:`CollectiveTransport` whose process group can break and be replaced.

    Args:
        goes_on: whether exchanges deliver zeros after a rank has gone (on homes), or raise an error (on servers).

    Attributes:
        broken: True before :meth:`use`, after :meth:`break_off`, and after this rank has left the group. Homes leave
            the group as soon as an exchange fails, and servers only when :meth:`give_up` is called.
    """

    def __init__(self, goes_on: bool) -> None:
        self._goes_on = goes_on
        self._group: dist.ProcessGroup | None = None
        self._inner: CollectiveTransport | None = None
        self._ending = threading.Lock()
        self.name, self.rank, self.ranks, self.broken = "", 0, 0, True

    def use(self, group: dist.ProcessGroup) -> None:
        """Leaves the old group, if any, and takes ``group``."""
        self.give_up()
        self._group, self._inner, self.broken = group, CollectiveTransport(group), False
        self.name, self.rank, self.ranks = self._inner.name, self._inner.rank, self._inner.ranks

    def give_up(self) -> None:
        """Leaves the group. Until :meth:`use` is called, exchanges deliver zeros or raise an error (``goes_on``)."""
        with self._ending:
            group, self._group, self._inner, self.broken = self._group, None, None, True
            if group is not None:
                give_up(group)

    def break_off(self) -> None:
        """Marks the group as broken, and ends NCCL operations that are under way. Any thread may call this."""
        with self._ending:
            self.broken = True
            if self._group is not None:
                break_off(self._group)

    def launch(self, parts: tuple[Part, ...]) -> BreakableHandle:
        """Starts an exchange.

        Raises:
            TransportError: ``parts`` were planned for another number of ranks; nothing was sent.
            RuntimeError: as in :meth:`failed`.
        """
        handle = None
        if self.broken:
            self.failed(PoolBrokenError())
        if self._inner is not None:
            try:
                handle = self._inner.launch(parts)
            except RuntimeError as error:
                self.failed(error)
        return BreakableHandle(self, handle, parts)

    def failed(self, error: RuntimeError) -> None:
        """Leaves the group after an exchange failed with ``error``.

        Raises:
            RuntimeError: ``error`` itself, if ``goes_on`` is False, or if the group is not broken and no rank is gone.
        """
        if not self._goes_on or not (self.broken or is_lost_peer(error)):
            raise error
        logger.debug("An exchange of rows failed: %s", error)
        # The traceback's frames would keep the group's connections open. Other ranks wait until these close.
        error.__traceback__ = None
        self.give_up()

    def came_to_end(self, device: torch.device) -> bool:
        """Waits for the device, and returns whether all exchanges of a step have succeeded on all ranks.

        All ranks must call this method at the end of a step. If the group is already broken, a home returns False at
        once.

        Raises:
            RuntimeError: as in :meth:`failed`.
        """
        here = torch.ones(1, device=device)
        try:
            if self.broken or self._group is None:
                self.failed(PoolBrokenError())
                return False
            dist.all_reduce(here, group=self._group)
            # An all-reduce that NCCL aborts may leave any number.
            whole = here.item() == self.ranks and not self.broken
        except RuntimeError as error:
            self.failed(error)
            return False
        if not whole:
            self.failed(PoolBrokenError())
        return whole


class BreakableHandle:
    """An exchange under way.

    If the group is broken, :meth:`wait` fills destinations with zeros. On servers a failed exchange raises an error.
    """

    def __init__(self, transport: BreakableTransport, handle: CollectiveHandle | None, parts: tuple[Part, ...]) -> None:
        self._transport, self._handle, self._parts = transport, handle, parts

    @property
    def works(self) -> list[Any]:
        return [] if self._handle is None else self._handle.works

    def tell(self, ended: Callable[[], None]) -> None:
        """Makes a gloo thread call ``ended`` after each collective of this exchange, if ``launch`` started any."""
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
