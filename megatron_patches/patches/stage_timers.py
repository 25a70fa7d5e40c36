"""A stand-in for megatron's timers, which records when a pipeline stage computes, for the timeline of 1F1B."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from distca.runtime.timeline import Timeline

_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward"}


class StageTimers:
    """The ``timers`` of a model's configuration, which record every forward and backward of a micro-batch.

    megatron's schedules start and stop timers around each of them, by name. Timers of other names do nothing. In the
    same-phase schedule layers record finer spans themselves.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._compute = {name: _StageTimer(timeline, said) for name, said in _COMPUTE.items()}
        self._other = _NoTimer()

    def __call__(self, name: str, log_level: int = 0) -> _StageTimer | _NoTimer:
        return self._compute.get(name, self._other)


class _NoTimer:
    def start(self, barrier: bool = False) -> None: ...
    def stop(self, barrier: bool = False) -> None: ...


class _StageTimer:
    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline, self._name = timeline, name
        self._span: AbstractContextManager[Any] | None = None

    def start(self, barrier: bool = False) -> None:
        self._span = self._timeline.stage(self._name)
        self._span.__enter__()

    def stop(self, barrier: bool = False) -> None:
        assert self._span is not None
        self._span.__exit__(None, None, None)
        self._span = None
