"""Steps made one ahead in a background thread, and compared between ranks.

Every rank knows the lengths of all documents, so every rank plans the same without talking, while the step before runs.
The training loop only waits if planning takes longer than a step; ``Step.waited_ms`` says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import torch

from distca.cluster.agreement import Agreement, Fingerprint
from distca.errors import PlanError
from megatron_patches.steps.step import Step
from megatron_patches.steps.step_documents import checksum


class AgreedSteps:
    """Makes the steps of loops of this rank, by turns in one thread, each compared with the other ranks'. All ranks
    create it together.

    Args:
        device: which the thread copies to.
    """

    def __init__(self, device: torch.device) -> None:
        self._agreement, self._thread = Agreement(), planning_thread(device)

    def ahead(self, steps: Iterable[Step], first: int) -> Generator[Step, None, None]:
        """The steps, made one ahead; every rank calls it in the same order.

        Args:
            steps: each is made when it is asked for.
            first: number of the first one, for messages; the same on every rank.

        Raises:
            PlanError: also if another rank planned a step differently, or could not plan it.
        """
        return iter(StepsAhead(self._agreement.on(steps, _fingerprint, first), self._thread))


def _fingerprint(step: Step) -> Fingerprint:
    return Fingerprint(step.plan.fingerprint, checksum(step.documents))


def planning_thread(device: torch.device) -> ThreadPoolExecutor:
    """The background thread in which steps are made, which copies to ``device``."""
    return ThreadPoolExecutor(1, thread_name_prefix="distca-planning", initializer=_begin, initargs=(device,))


_here = threading.local()


def _begin(device: torch.device) -> None:
    _here.plans = True
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _is_planning() -> bool:
    """Whether this is a thread that makes steps, which would wait for itself."""
    return getattr(_here, "plans", False)


class StepsAhead:
    """Makes steps in a background thread, one ahead.

    Several of them may share a thread, which makes their steps in the order in which they were begun: the same one on
    every rank, whichever rank leaves a loop first.

    Args:
        steps: each is made when it is asked for; asked only by the thread, in order.
        thread: from :func:`planning_thread`.
    """

    def __init__(self, steps: Iterable[Step], thread: ThreadPoolExecutor) -> None:
        self._steps, self._thread = iter(steps), thread
        self._next: Future[Step | None] | None = None
        self._closed = False

    def __iter__(self) -> Generator[Step, None, None]:
        """All steps."""
        try:
            while (step := self._take()) is not None:
                yield step
        finally:
            self.close()

    def start(self) -> None:
        """Begin with the next step, unless it is being made already or nobody will take it."""
        if self._next is None and not self._closed:
            stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
            self._next = self._thread.submit(self._make, stream)

    def _make(self, stream: torch.cuda.Stream | None) -> Step | None:
        with torch.cuda.stream(stream):  # that of the caller, who reads what is copied
            return next(self._steps, None)

    def close(self) -> None:
        """Wait for what was begun, because other ranks may compare theirs with it, and forget it."""
        self._closed, begun, self._next = True, self._next, None
        if begun is not None and not _is_planning():  # which collects garbage too
            wait([begun])

    def _take(self) -> Step | None:
        if _is_planning():
            raise PlanError(
                "The documents of a step ask for a planned step themselves, in the one thread that plans: plan it "
                "before, or in the loop of plan_ahead."
            )
        self.start()
        assert self._next is not None
        began = time.perf_counter()
        try:
            step = self._next.result()
        finally:
            self._next = None
        if step is None:
            return None
        # While the caller queues the step, Python's lock should not be shared with the thread that plans.
        return replace(step, waited_ms=(time.perf_counter() - began) * 1e3, queued=self.start)
