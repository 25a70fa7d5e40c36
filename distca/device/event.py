"""Events on CUDA streams that never hold Python's lock while the CUDA driver waits.

A call into CUDA waits when a stream cannot take more work. That can last forever, if the stream waits for a rank that
is gone. torch.cuda.Event keeps Python's lock during some calls. Then no other thread of the process runs, and none can
report the lost rank. The calls here go through ctypes, which releases the lock.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

_NOT_READY = 600
"""CUDA's code for an event that has not come yet."""
_BLOCKS, _UNTIMED = 0, 2
"""CUDA's flags for an event that measures time, and for one that does not."""
_FUNCTIONS = (
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaEventElapsedTime",
    "cudaEventDestroy",
    "cudaGetLastError",
    "cudaStreamWaitEvent",
)


class Event:
    """An event on the current GPU, with the methods of torch.cuda.Event that are used here.

    An event *comes* when a stream reaches the place at which it was recorded.

    Args:
        timed: whether the event can be used in :meth:`elapsed_time`.

    Raises:
        RuntimeError: CUDA refuses a call, or work on the GPU has failed.
    """

    def __init__(self, timed: bool = False) -> None:
        self._handle, self._destroy = ctypes.c_void_p(), _runtime().cudaEventDestroy
        torch.cuda.current_stream()  # starts CUDA and makes torch's current GPU the runtime's current one
        _call("cudaEventCreateWithFlags", ctypes.byref(self._handle), _BLOCKS if timed else _UNTIMED)

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Records the event behind all work that a stream has now; by default that is torch's current stream."""
        _call("cudaEventRecord", self._handle, _of(stream or torch.cuda.current_stream()))

    def query(self) -> bool:
        """Whether the event has come."""
        has_come = _call("cudaEventQuery", self._handle) != _NOT_READY
        if not has_come:
            _call("cudaGetLastError")  # clears the answer, which torch would take for an error of its next call
        return has_come

    def synchronize(self) -> None:
        """Makes this thread wait until the event has come."""
        _call("cudaEventSynchronize", self._handle)

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Makes work that is queued on a stream from now on wait until the event has come."""
        _call("cudaStreamWaitEvent", _of(stream), self._handle, 0)

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds from this event to a later one; both are timed and have come."""
        milliseconds = ctypes.c_float()
        _call("cudaEventElapsedTime", ctypes.byref(milliseconds), self._handle, end._handle)
        return milliseconds.value

    def __del__(self) -> None:
        if self._handle:
            self._destroy(self._handle)


def _of(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)


def _call(name: str, *arguments: object) -> int:
    """Calls a function of the CUDA runtime; returns its code, 0 or ``_NOT_READY``."""
    code: int = getattr(_runtime(), name)(*arguments)
    if code not in (0, _NOT_READY):
        raise RuntimeError(f"{name} failed with CUDA error {code}.")
    return code


@cache
def _runtime() -> ctypes.CDLL:
    """Returns the CUDA runtime library that torch has loaded."""
    library = ctypes.CDLL(None)
    if not hasattr(library, _FUNCTIONS[0]):
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = [line.split()[-1] for line in maps if "libcudart" in line]
        assert paths, "torch with CUDA has loaded its runtime"
        library = ctypes.CDLL(paths[0])
    for name in _FUNCTIONS:
        getattr(library, name).restype = ctypes.c_int
    return library
