"""Plans the next step, a global batch, in a background thread while the device runs the current step."""

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
    """Makes the steps of this rank's loops (training, validation) in one thread, and compares each step between ranks.

    Ranks compare checksums of the step's plan, of the documents' weights in the loss, and of a few token ids. All ranks
    must create the object together, because it creates a process group.

    Args:
        device: the device to which the thread copies a step's tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._agreement, self._thread = Agreement(), planning_thread(device)

    def ahead(self, steps: Iterable[Step], first: int) -> Generator[Step, None, None]:
        """Yields the steps, and makes each while the step before runs.

        All ranks must call this method for the same loops in the same order.

        Args:
            first: number of the first step, for messages; the same on every rank.

        Raises:
            PlanError: a step could not be made on another rank; ranks have different plans or documents; a rank has
                fewer steps; ranks are in different loops; or ``steps`` itself asks for a step of another loop.
        """
        return iter(StepsAhead(self._agreement.on(steps, _fingerprint, first), self._thread))


def _fingerprint(step: Step) -> Fingerprint:
    return Fingerprint(step.plan.fingerprint, checksum(step.documents))


def planning_thread(device: torch.device) -> ThreadPoolExecutor:
    """Returns a pool of one thread for :class:`StepsAhead`, with ``device`` as its current CUDA device."""
    return ThreadPoolExecutor(1, thread_name_prefix="distca-planning", initializer=_begin, initargs=(device,))


_here = threading.local()


def _begin(device: torch.device) -> None:
    _here.plans = True
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _is_planning() -> bool:
    """Whether the caller runs in the planning thread. Only that thread makes steps, so it must not wait for one."""
    return getattr(_here, "plans", False)


class StepsAhead:
    """Makes the steps of one loop in a background thread, one step ahead of the loop.

    Args:
        steps: an iterable that makes a step at each ``next``. Only ``thread`` calls ``next``.
        thread: from :func:`planning_thread`.
    """

    def __init__(self, steps: Iterable[Step], thread: ThreadPoolExecutor) -> None:
        self._steps, self._thread = iter(steps), thread
        self._next: Future[Step | None] | None = None
        self._closed = False

    def __iter__(self) -> Generator[Step, None, None]:
        try:
            while (step := self._take()) is not None:
                yield step
        finally:
            self.close()

    def start(self) -> None:
        """Begins to make the next step, unless that step is begun already or the loop has ended."""
        if self._next is None and not self._closed:
            stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
            self._next = self._thread.submit(self._make, stream)

    def _make(self, stream: torch.cuda.Stream | None) -> Step | None:
        with torch.cuda.stream(stream):  # the training loop's stream, which reads the step's tensors
            return next(self._steps, None)

    def close(self) -> None:
        """Ends the loop. A step that was begun is finished, because other ranks wait for its checksums."""
        self._closed, begun, self._next = True, self._next, None
        # Garbage collection may run close() in the planning thread, which cannot wait for itself.
        if begun is not None and not _is_planning():
            wait([begun])

    def _take(self) -> Step | None:
        if _is_planning():
            raise PlanError(
                "The iterable that plan_ahead was given asks for a planned step of another plan_ahead, so the thread "
                "that plans would wait for itself. Run the other plan_ahead before this loop, or in its body."
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
        # CAD.forward_backward calls `queued` when all work of this step is queued on the device. Planning that began
        # earlier would slow the queueing, because both need Python's global lock.
        return replace(step, waited_ms=(time.perf_counter() - began) * 1e3, queued=self.start)
