"""The words in which a rank reports its own failure, or the loss of other ranks."""

from __future__ import annotations

import logging
import os
import socket
import traceback
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from distca.cluster.board import Failure
from distca.cluster.waits import Stuck
from distca.errors import DistcaError
from distca.log import MISTAKE, say_mistake

if TYPE_CHECKING:
    from distca.cluster.members import Members

logger = logging.getLogger(__name__)

EXIT_CODE = 71
"""The exit code of a rank that waited for rows of a rank which has ended."""
_GO_ON = "Go on from the last checkpoint."


class FailureReports:
    """Makes and says one rank's reports.

    Args:
        rank: the rank.
        hosts: the host names of all ranks.
        pool: in runs with servers without a model, all ranks (called homes) and servers; else None.

    Attributes:
        doing: the present activity of the rank, such as "step 7".
    """

    def __init__(self, rank: int, hosts: Mapping[int, str], pool: Members | None) -> None:
        self._rank, self._hosts, self._pool = rank, hosts, pool
        self.doing = "starting"

    def of_error(self, error: BaseException) -> Failure:
        kind = type(error).__name__
        if isinstance(error, DistcaError):
            return Failure(rank=self._rank, kind=kind, sentence=str(error), details=error.next_step, code=MISTAKE)
        what = traceback.format_exception_only(error)[-1].strip()
        return Failure(
            rank=self._rank,
            kind=kind,
            sentence=f"{self.name(self._rank)} failed in {self.doing} on {socket.gethostname()}: {what}",
            details="".join(traceback.format_exception(error)).rstrip(),
            code=1,
        )

    def of_death(self, pids: Mapping[int, int]) -> Failure:
        """Reports ranks of this node whose processes died; ``pids`` has their process ids, by rank."""
        dead = list(pids)
        who = self.name(dead[0]) if len(dead) == 1 else self._names(dead)
        whose = f"process {listed(pids.values())} on {socket.gethostname()}"
        return self._of_loss(
            f"{who} died in {self.doing} ({whose}): killed from outside, out of memory, or by an error that it "
            "reported above."
        )

    def of_silence(self, ranks: list[int], seconds: float) -> Failure:
        """Reports ranks that have given no sign of life for so many seconds."""
        hosts = sorted({self._hosts[rank] for rank in ranks})
        what = "the node or its network is gone"
        if self._pool is not None and min(ranks) >= self._pool.homes:
            what = "the process, its node or the network is gone"
        return self._of_loss(
            f"No sign of life from {self._names(ranks)} on {', '.join(hosts)} for {seconds:.0f} s, in {self.doing}: "
            f"{what}."
        )

    def of_silent_store(self, seconds: float) -> Failure:
        return self._of_loss(
            f"The store of torch.distributed on {os.environ.get('MASTER_ADDR', 'the node of rank 0')} has not answered "
            f"{self.name(self._rank).lower()} for {seconds:.0f} s, in {self.doing}: the node or its network is gone."
        )

    def of_wait(self, stuck: Stuck, gone: Iterable[int]) -> Failure:
        """Reports a wait of this rank for ranks that have ended."""
        wait, ranks = stuck.wait, listed(gone)
        return Failure(
            rank=self._rank,
            kind="",
            sentence=f"Rank {self._rank} waits for {wait.what} exchange {wait.number} from rank {ranks}, which has "
            f"ended; so this rank ends too. Look at the log of rank {ranks} for the reason, and go on from the last "
            "checkpoint.",
            details="",
            code=EXIT_CODE,
        )

    def say(self, failure: Failure) -> None:
        own = failure.rank == self._rank
        if failure.is_mistake and own:
            say_mistake(failure.sentence, failure.details)
        elif failure.is_mistake:
            logger.error("%s ended the run in %s: %s", self.name(failure.rank), self.doing, failure.sentence)
        else:
            logger.critical("%s\n%s", failure.sentence, failure.details)

    def name(self, rank: int) -> str:
        return f"Rank {rank}" if self._pool is None else self._pool.name(rank)

    def _of_loss(self, sentence: str) -> Failure:
        return Failure(
            rank=self._rank, kind="", sentence=sentence, details=f"All other ranks end too. {_GO_ON}", code=1
        )

    def _names(self, ranks: list[int]) -> str:
        homes = [rank for rank in ranks if self._pool is None or rank < self._pool.homes]
        words = [f"ranks {listed(homes)}"] if homes else []
        words += [self.name(rank) for rank in ranks if rank not in homes]
        return " and ".join(words)


def listed(numbers: Iterable[Any]) -> str:
    return ", ".join(map(str, numbers))
