"""The command that starts the ranks, and running it so that a signal ends all of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from distca.cluster.parent import end_with_parent
from distca.train.launch.machines import Machines

_TELL_AGAIN_S = 5.0
"""Ranks that are still starting hear of SIGUSR1 later."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1)

_told_early: list[int] = []


def hear_early() -> None:
    """From here on SIGUSR1 does not end this process; ranks are told once they run."""
    signal.signal(signal.SIGUSR1, lambda number, _: _told_early.append(number))


def command(
    machines: Machines,
    python: str,
    program: Sequence[str],
    environment: Mapping[str, str],
    more: Sequence[str] = (),
    profiler: Sequence[str] = (),
) -> list[str]:
    """Returns the command that starts ``program`` on every rank.

    Args:
        machines: where.
        python: the Python of every rank.
        program: what it gets.
        environment: all variables, with Slurm's.
        more: variables to set, as NAME=value.
        profiler: what goes before each process.
    """
    variables = list(more)
    if not machines.gpus:
        # Several ranks share the cores; more threads than cores only get in each other's way.
        variables += [f"OMP_NUM_THREADS={environment.get('OMP_NUM_THREADS') or 1}", "CUDA_VISIBLE_DEVICES="]
    if machines.starter == "srun":
        variables += [f"MASTER_ADDR={machines.first}", f"MASTER_PORT={machines.port}"]
        variables += [f"WORLD_SIZE={machines.world_size}", f"LOCAL_WORLD_SIZE={machines.ranks_per_node}"]
        return ["env", *variables, *_srun(machines, environment), *profiler, python, *program]
    # Of the Python that was checked, and not of another one on the PATH.
    torchrun = [python, "-m", "distca.cluster.torchrun", f"--nproc-per-node={machines.ranks_per_node}"]
    if machines.nodes > 1:
        torchrun += [f"--nnodes={machines.nodes}", f"--node-rank={machines.node}"]
        torchrun += [f"--master-addr={machines.first}", f"--master-port={machines.port}"]
    else:
        torchrun += ["--standalone"]
    return ["env", *variables, *profiler, *torchrun, *program]


def _srun(machines: Machines, environment: Mapping[str, str]) -> list[str]:
    words = ["srun", f"--nodes={machines.nodes}", f"--ntasks={machines.world_size}"]
    words += [f"--ntasks-per-node={machines.ranks_per_node}", "--kill-on-bad-exit=1"]
    # Without this a task may get one core only. SLURM_JOB_CPUS_PER_NODE may read 64(x2).
    cores = re.match("[0-9]+", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if cores and int(cores[0]) >= machines.ranks_per_node:
        words.append(f"--cpus-per-task={int(cores[0]) // machines.ranks_per_node}")
    # The variables expand in each task. SIGUSR1 ends no rank that is still starting.
    shell = 'trap "" USR1; export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"'
    return [*words, "bash", "-c", shell, "rank"]


@dataclass
class Ranks:
    """Ranks while they run.

    Attributes:
        words: the command that starts them.
        log: file that gets what they say, beside standard output; None leaves them the terminal.
        status: exit code, as a shell has it.
        stopped_by: the signal that ended them.
        asked_to_save: SIGUSR1 came, by which Slurm says that the job's time is nearly over.
    """

    words: Sequence[str]
    log: Path | None = None
    status: int = 0
    stopped_by: signal.Signals | None = None
    asked_to_save: bool = False
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def run(self) -> Ranks:
        """Start them and wait until they have ended.

        SIGUSR1 and a first SIGTERM go to the ranks, which save and end: torchrun would end them half a minute later.
        Any other signal ends them, as SIGTERM to torchrun or srun.
        """
        before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        self.asked_to_save = bool(_told_early)
        try:
            output = None if self.log is None else subprocess.PIPE
            # Ctrl-C reaches the whole terminal; the ranks are told once, by this process.
            self._process = subprocess.Popen(
                self.words, stdout=output, stderr=output and subprocess.STDOUT, preexec_fn=_begin
            )
            if self.stopped_by:  # it came before there was a process to stop
                self._process.terminate()
            copied = self.log is None or _copy(self._process.stdout, self.log)
            code = self._wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.status = 128 - code if code < 0 else code
        if not code:
            self.stopped_by = None  # it came too late
        if self.stopped_by:
            self.status = 128 + self.stopped_by
        self.status = self.status or int(not copied)
        return self

    def _wait(self) -> int:
        assert self._process is not None
        while True:
            try:
                return self._process.wait(_TELL_AGAIN_S)
            except subprocess.TimeoutExpired:
                if self.asked_to_save:
                    _tell_ranks(self._process.pid, signal.SIGUSR1)

    def _stop(self, number: int, _: FrameType | None) -> None:
        again, asks = self.stopped_by is not None, number in (signal.SIGTERM, signal.SIGUSR1)
        if number == signal.SIGUSR1:
            self.asked_to_save = True
        else:
            self.stopped_by = signal.Signals(number)
        if self._process and not (asks and not again and _tell_ranks(self._process.pid, number)):
            self._process.terminate()


def _tell_ranks(starter: int, number: int) -> bool:
    """Send a signal to the ranks below a process; whether there are any. srun has none here and passes SIGUSR1 on."""
    told = False
    for process in _ranks_below(starter):
        with suppress(ProcessLookupError):
            os.kill(process, number)
            told = True
    if not told and number == signal.SIGUSR1:
        os.kill(starter, number)
        told = True
    return told


def _ranks_below(process: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(variable.startswith(b"RANK=") for variable in variables):
            yield child
        else:
            yield from _ranks_below(child)


def _begin() -> None:
    """In the process that starts ranks: hear nothing of the terminal, and SIGTERM when the launcher is killed, or the
    ranks would go on with nobody to end them."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1):  # ranks listen to the last as soon as they can
        signal.signal(number, signal.SIG_IGN)


def _copy(source: IO[bytes] | None, log: Path) -> bool:
    """Copy all of ``source`` to standard output and into ``log``; whether both could be written to the end."""
    assert source is not None
    with log.open("wb", buffering=0) as file:
        sinks = {sys.stdout.fileno(), file.fileno()}
        while chunk := os.read(source.fileno(), 1 << 16):
            for sink in tuple(sinks):
                try:
                    _write(sink, chunk)
                except OSError:
                    sinks.remove(sink)  # a full disk or a closed pipe ends no run
    return len(sinks) == 2


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]
