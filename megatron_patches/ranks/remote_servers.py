"""How servers without a model take part in a step.

Such a *server* is a process that only computes core attention. The ranks that train are its *homes*. Homes and servers
each make the same *plan* from documents' lengths. It says who computes which part of a step's core attention.

Rank 0 of the homes writes messages into a key-value store, and all servers read them in order. Each step has the
first two of these messages. Rank 0 sends the third one when a recording of times ends.

| message | a server's answer |
|---|---|
| plan, with the documents' lengths | its plan's fingerprint, a checksum that differs between different plans |
| run | the seconds and the memory that the step took there |
| timeline | the spans of time that it recorded |

Rows of q, k, v and outputs travel in a process group. ``server_members.py`` forms it at the start, and a new one when
servers come or go.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from distca.errors import LaunchError, PlanError
from distca.plan.step import StepPlan
from distca.plan.step_file import StepInputs
from distca.runtime.pool_messages import Comer, Served
from megatron_patches.ranks.server_members import ServerMembers


class RemoteServers(ServerMembers):
    """A home's access to the servers. All homes create it together, with the arguments of the base class."""

    def __init__(self, servers: int, tp: int, transport: str, device: torch.device) -> None:
        super().__init__(servers, tp, transport, device)
        self._numbers = count(1)  # numbers of steps and of requests for timelines
        self._runs = 0  # how often steps ran; a step that runs twice gets two reports

    def announce(self, inputs: StepInputs) -> int:
        """Makes servers plan a step. Returns the number by which later calls name the step; 0 on ranks other than 0."""
        if not self._leads:
            return 0
        number = next(self._numbers)
        self._store.tell("plan", (number, _lengths(inputs)))
        return number

    def agree(self, number: int, plan: StepPlan) -> None:
        """On rank 0, waits until all servers have planned step ``number``, and compares their plans with ``plan``.

        On devices on which servers may leave (``MAY_GO``), a new generation forms if a server does not answer, and the
        step is planned again. The server leaves if it does not answer then either.

        Raises:
            PlanError: a server has another plan or could not plan.
            LaunchError: a server does not answer, on a device on which servers have to stay.
        """
        if self._leads:
            for each in self._servers:
                key = f"planned/{number}/{each.number}"
                if self._answers(key, each):
                    check_planned(self._store.take(key), each.number, plan.fingerprint)
                elif self._may_change:
                    self._lost.add(each.number)
                else:
                    raise LaunchError(f"Server {each.number} of the pool does not plan: look at the server's output.")

    def run(self, number: int, plan: StepPlan, forward_only: bool, zero: float | None) -> None:
        """Makes servers compute their part of a step.

        Args:
            number: from :meth:`announce`.
            plan: the homes' plan of the step.
            forward_only: whether to leave out backward.
            zero: when homes began to record a timeline, in seconds since 1970; None if they record none. Servers record
                one if homes do.
        """
        if self._leads:
            self._runs += 1
            # A server that has dropped its plan makes it again from these lengths. The first planning may have moved
            # documents to other micro-batches, and ``plan.lengths`` lists them in these micro-batches. None in place of
            # ``StepInputs.room`` forbids further moves.
            lengths = (plan.lengths, plan.homes, None)
            self._store.tell("run", (number, self._runs, lengths, forward_only, zero))

    def is_served(self) -> bool:
        """Whether all exchanges of the step that just ran have succeeded; all homes call it together."""
        return not (self._may_change and self._anywhere(not self.transport.came_to_end(self._device)))

    def served(self) -> list[Served | None] | None:
        """Waits for the servers' reports on the step that ran last, and returns them in the servers' order.

        None stands for a server that has left, has lost another member of the pool, or does not answer. Ranks other
        than 0 get None in place of a list.
        """
        if not self._leads:
            return None
        return [self._answer(f"served/{self._runs}/{each.number}", each) for each in self._servers]

    def timelines(self) -> dict[int, list[dict[str, Any]]]:
        """Ends the servers' timelines, and returns them by the servers' numbers; empty on ranks other than 0."""
        if not self._leads:
            return {}
        number = next(self._numbers)
        self._store.tell("timeline", number)
        return {each.number: self._answer(f"timeline/{number}/{each.number}", each) or [] for each in self._servers}

    def _answer(self, key: str, server: Comer) -> Any:
        """Returns a server's answer under ``key`` in the store; None if the server has left or does not answer."""
        return self._store.take(key) if self._answers(key, server) else None


def check_planned(found: int | str, server: int, fingerprint: int) -> None:
    """Refuses a server's plan that differs from the homes' plan.

    Args:
        found: the fingerprint of the server's plan, or an error's text if the server could not plan.
        server: the server's number.
        fingerprint: that of the homes' plan.

    Raises:
        PlanError: the fingerprints differ, or the server could not plan.
    """
    if isinstance(found, str):
        raise PlanError(f"Server {server} of the pool could not plan a step: {found}")
    if found != fingerprint:
        raise PlanError(
            f"Server {server} of the pool planned a step differently from the ranks that train, so the step was not "
            "run: compare versions of distca and numpy by `distca doctor` on both nodes."
        )


def _lengths(inputs: StepInputs) -> tuple[Sequence[Any], Any, Any]:
    """Returns the inputs of a plan without the options, which servers have."""
    return inputs.lengths, inputs.homes, inputs.room
