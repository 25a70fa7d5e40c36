"""Late servers: servers without a model that come during a run, and wait until the ranks that train let them join.

The ranks that train are called *homes*. Only the first home makes a :class:`LateServers`. A *pool* is all homes with
the same tensor-parallel rank, and their servers. Homes and servers share a :class:`PoolStore`. There a late server
raises the count "comers" by 1. Then the server writes a :class:`Comer` under the old count. Example: the first late
server raises "comers" from 0 to 1 and writes "comer/0".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from distca.cluster.pool_store import PoolStore
from distca.cluster.pool_watch import PoolWatch
from distca.errors import SupportError
from distca.runtime.pool_messages import Comer
from megatron_patches.support.servers import check_gpus

logger = logging.getLogger(__name__)


class LateServers:
    """The servers that came during the run and have not joined yet.

    Args:
        store: the store with the :class:`Comer` of each late server.
        tp: number of tensor-parallel ranks.
        device: the homes' type of device.
        gpus: identities of the homes' GPUs; "" for a CPU.
        watch: knows which servers are gone.
    """

    def __init__(self, store: PoolStore, tp: int, device: str, gpus: Collection[str], watch: PoolWatch) -> None:
        self._store, self._tp, self._device, self._gpus, self._watch = store, tp, device, gpus, watch
        self.waiting: list[Comer] = []
        self._came = 0  # how many have come since the run began
        self._unread: list[int] = []  # which of them, counted from 0, have not written their Comer yet

    def hear(self, servers: Sequence[Comer]) -> None:
        """Reads who has come since the last call, drops those that have ended, and refuses those that cannot join.

        A process that comes again has ended its earlier call of serve(), so only its newest Comer counts.

        Args:
            servers: the present servers of all pools.
        """
        came = self._store.count("comers")
        self._unread += range(self._came, came)
        self._came = came
        # A server that ends after it raised the count writes no Comer. Homes must not wait for it.
        new = [each for each in self._unread if self._store.has(f"comer/{each}")]
        self._unread = [each for each in self._unread if each not in new]
        newest = {each.process: each for each in self.waiting}
        for each in new:
            comer: Comer = self._store.take(f"comer/{each}")
            newest[comer.process] = comer
        self.waiting = [each for process, each in newest.items() if not self._watch.is_gone(process)]
        self._refuse_unfit(servers)
        joining = self.joining()
        too_few = [each.number for each in self.waiting if each not in joining]
        if new and too_few:
            logger.warning(
                "Of the servers without a model, %s waiting, as servers join %d at a time, one for each "
                "tensor-parallel rank.",
                *(servers_are(too_few), self._tp),
            )

    def joining(self) -> list[Comer]:
        """Returns the servers that join next, in order of their numbers; equally many for each tensor-parallel rank."""
        some = sorted(
            (each for each in self.waiting if not self._watch.is_gone(each.process)), key=lambda each: each.number
        )
        return some[: len(some) // self._tp * self._tp]

    def take(self) -> list[Comer]:
        """Returns :meth:`joining`; these servers do not wait any more."""
        joining = self.joining()
        self.waiting = [each for each in self.waiting if each not in joining]
        return joining

    def stays(self, server: Comer) -> bool:
        """Whether a present server has not ended, and its process has not come again."""
        return not self._watch.is_gone(server.process) and all(each.process != server.process for each in self.waiting)

    def _refuse_unfit(self, servers: Sequence[Comer]) -> None:
        """Refuses late servers on another type of device than homes, with a taken number, or on a taken GPU."""
        taken = {each.number for each in servers if self.stays(each)}
        for each in list(self.waiting):
            wrong = None
            if each.device != self._device:
                wrong = f"Server {each.number} has device {each.device}, and the homes compute on {self._device}."
            elif each.number in taken:
                wrong = f"The homes have a server {each.number} already: give this one another number."
            if wrong is None:
                taken.add(each.number)
            else:
                self._refuse([each], wrong)
        self._refuse_shared_gpus(servers)

    def _refuse_shared_gpus(self, servers: Sequence[Comer]) -> None:
        """Refuses servers on a GPU of a home or of another server in their pool: no process group could form then.

        Servers join ``tp`` at a time, one for each tensor-parallel rank. Those that would join together with a refused
        server are refused too.
        """
        stay = whole_places(servers, self._tp, self.stays)
        joining = self.joining()
        for at in range(0, len(joining), self._tp):
            place = joining[at : at + self._tp]
            try:
                check_gpus([*stay, *place], self._tp, self._gpus)
            except SupportError as error:
                self._refuse(place, str(error))
            else:
                stay += place

    def _refuse(self, servers: Sequence[Comer], why: str) -> None:
        for each in servers:
            self.waiting.remove(each)
            self._store.put(f"welcome/{each.arrival}", why)


def whole_places(servers: Sequence[Comer], tp: int, can_stay: Callable[[Comer], bool]) -> list[Comer]:
    """Returns the servers that stay in the pool. ``can_stay`` says whether one server is able to stay.

    Each ``tp`` consecutive servers, one for each tensor-parallel rank, stay or leave together. They stay if all of them
    are able to.
    """
    places = [servers[at : at + tp] for at in range(0, len(servers), tp)]
    return [each for place in places if all(map(can_stay, place)) for each in place]


def servers_are(numbers: Sequence[int]) -> str:
    """Returns a part of a sentence: "server 0 is" or "servers 0, 1 are"."""
    return f"server {numbers[0]} is" if len(numbers) == 1 else f"servers {', '.join(map(str, numbers))} are"
