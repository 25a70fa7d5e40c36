"""Events on CUDA streams. Python's other threads go on while one of their calls waits for the driver.

A call into CUDA waits where a stream can take no more work, or where another thread waits for that. torch.cuda.Event
records and asks with Python's lock held: behind a rank that is gone, nobody in this process could say so any more.
ctypes gives the lock away.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

_NOT_READY = 600
_BLOCKS, _UNTIMED = 0, 2
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
    """The part of torch.cuda.Event that is used here. An event is made on the current GPU.

    Args:
        timed: whether it can be given to :meth:`elapsed_time`.

    Raises:
        RuntimeError: CUDA refuses a call, or work on the GPU has failed.
    """

    def __init__(self, timed: bool = False) -> None:
        self._handle, self._destroy = ctypes.c_void_p(), _runtime().cudaEventDestroy
        torch.cuda.current_stream()  # CUDA has been started, and the current GPU is torch's
        _call("cudaEventCreateWithFlags", ctypes.byref(self._handle), _BLOCKS if timed else _UNTIMED)

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Come when all is done that a stream, by default torch's current one, holds by now."""
        _call("cudaEventRecord", self._handle, _of(stream or torch.cuda.current_stream()))

    def query(self) -> bool:
        """Whether it has come."""
        has_come = _call("cudaEventQuery", self._handle) != _NOT_READY
        if not has_come:
            _call("cudaGetLastError")  # or torch would take this answer for an error of its next call
        return has_come

    def synchronize(self) -> None:
        """Let this thread wait until it has come."""
        _call("cudaEventSynchronize", self._handle)

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let what a stream is given from now on wait until it has come."""
        _call("cudaStreamWaitEvent", _of(stream), self._handle, 0)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to a later one; both are timed and have come."""
        milliseconds = ctypes.c_float()
        _call("cudaEventElapsedTime", ctypes.byref(milliseconds), self._handle, end._handle)
        return milliseconds.value

    def __del__(self) -> None:
        if self._handle:
            self._destroy(self._handle)


def _of(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)


def _call(name: str, *arguments: object) -> int:
    code: int = getattr(_runtime(), name)(*arguments)
    if code not in (0, _NOT_READY):
        raise RuntimeError(f"{name} failed with CUDA error {code}.")
    return code


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    library = ctypes.CDLL(None)
    if not hasattr(library, _FUNCTIONS[0]):
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = [line.split()[-1] for line in maps if "libcudart" in line]
        assert paths, "torch with CUDA has loaded its runtime"
        library = ctypes.CDLL(paths[0])
    for name in _FUNCTIONS:
        getattr(library, name).restype = ctypes.c_int
    return library
