"""Steps that are made one ahead in a background thread, and compared between ranks.

Every rank knows the lengths of all documents, so all ranks plan alike without messages, while the step before runs. The
training loop waits only if planning takes longer than a step; ``Step.waited_ms`` has that time.
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
    """Makes the steps of this rank's loops in one thread, and compares each with the other ranks' step. All ranks
    create it together.

    Args:
        device: the device to which the thread copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._agreement, self._thread = Agreement(), planning_thread(device)

    def ahead(self, steps: Iterable[Step], first: int) -> Generator[Step, None, None]:
        """Yields the steps, made one ahead; all ranks call it in the same order.

        Args:
            steps: an iterable that makes each step when it is asked for it.
            first: number of the first step, for messages; the same on every rank.

        Raises:
            PlanError: making a step raised it, or another rank planned a step differently, or could not plan it.
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
    """Whether this is a thread that makes steps, in which waiting for a step would never end."""
    return getattr(_here, "plans", False)


class StepsAhead:
    """Makes steps in a background thread, one ahead.

    Several of these objects may share a thread. It makes their steps in the order in which they were begun, which is
    the same on every rank, whichever rank leaves a loop first.

    Args:
        steps: an iterable that makes each step when it is asked for it; only the thread asks, in order.
        thread: from :func:`planning_thread`.
    """

    def __init__(self, steps: Iterable[Step], thread: ThreadPoolExecutor) -> None:
        self._steps, self._thread = iter(steps), thread
        self._next: Future[Step | None] | None = None
        self._closed = False

    def __iter__(self) -> Generator[Step, None, None]:
        """Yields all steps."""
        try:
            while (step := self._take()) is not None:
                yield step
        finally:
            self.close()

    def start(self) -> None:
        """Begins the next step, unless it is being made already, or nobody will take it."""
        if self._next is None and not self._closed:
            stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
            self._next = self._thread.submit(self._make, stream)

    def _make(self, stream: torch.cuda.Stream | None) -> Step | None:
        with torch.cuda.stream(stream):  # the caller's stream, on which copied rows are read
            return next(self._steps, None)

    def close(self) -> None:
        """Waits for a step that was begun, as other ranks may compare theirs with it, and drops it."""
        self._closed, begun, self._next = True, self._next, None
        if begun is not None and not _is_planning():  # garbage collection in the thread may call this
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
        # The next step is begun once the caller has queued this one. Before, the thread would hold Python's lock while
        # the caller needs it.
        return replace(step, waited_ms=(time.perf_counter() - began) * 1e3, queued=self.start)
