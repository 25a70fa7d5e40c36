"""The homes and servers of :mod:`benchmarks.server_kills`, and processes of servers that can be ended or stopped."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
import torch.distributed as dist

from distca.testing.ranks import forked
from distca.testing.shared_gpus import each_a_machine
from distca.transport.collective import nccl_goes_first

How = Literal["killed", "stopped"]


@dataclass(frozen=True)
class Setup:
    """The pool.

    Attributes:
        homes, servers: how many.
        tp, pp: tensor-parallel ranks and pipeline stages of the homes.
        ep: homes that share a layer's experts; 0 for a dense model.
        pattern: layers of a HybridModel, a symbol for each; empty for a GPTModel, in which all layers have attention.
        gpus: whether each has a GPU.
        sockets: GPUs reach each other as if each were a machine of its own.
    """

    homes: int = 2
    servers: int = 4
    tp: int = 1
    pp: int = 1
    ep: int = 0
    pattern: str = ""
    gpus: bool = False
    sockets: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a home in a micro-batch."""
        return 16_384 if self.gpus else 1024 // self.homes

    @property
    def sizes(self) -> dict[str, Any]:
        """The model's: a step takes some tenths of a second."""
        if self.pattern:
            return {"layers": len(self.pattern.replace("|", ""))}
        return {"layers": 4, "hidden": 1024, "ffn": 2048, "heads": 8, "kv_heads": 2} if self.gpus else {"layers": 2}

    def take_device(self, process: int) -> torch.device:
        """The device of a process: homes by rank, then servers by number, of which later ones have an earlier one's."""
        if not self.gpus:
            return torch.device("cpu")
        of_server = self.homes + (process - self.homes) % self.servers
        device = torch.device("cuda", process if process < self.homes else of_server)
        torch.cuda.set_device(device)
        nccl_goes_first()
        if self.sockets:
            each_a_machine(process)
        return device


def server(folder: str, number: int, setup: Setup) -> None:
    """The process of a server without a model."""
    torch.set_num_threads(1)
    setup.take_device(setup.homes + number)
    from distca import serve

    serve(dist.FileStore(f"{folder}/homes"), number)
    os._exit(0)


class Servers:
    """The servers that the first home starts and loses."""

    def __init__(self, folder: str, setup: Setup) -> None:
        self._folder, self._setup, self._next = folder, setup, 0
        self.processes: dict[int, BaseProcess] = {}
        self._stopped: list[BaseProcess] = []
        self.begun: dict[int, float] = {}

    def start(self) -> int:
        """Start one; returns its number."""
        number, self._next = self._next, self._next + 1
        self.begun[number] = time.monotonic()
        self.processes[number] = forked(server, self._folder, number, self._setup)
        return number

    def lose(self, number: int, how: How = "killed") -> None:
        """End or stop one at once, in whatever it is."""
        process = self.processes.pop(number)
        if how == "stopped":
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            self._stopped.append(process)
        else:
            _end(process)

    def end_stopped(self) -> None:
        """End those that were stopped: others take their places."""
        while self._stopped:
            _end(self._stopped.pop())


def _end(process: BaseProcess) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError):  # homes may have let it go
        os.kill(process.pid, signal.SIGKILL)
    process.join()
