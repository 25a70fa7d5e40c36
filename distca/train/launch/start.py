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
from typing import IO, NamedTuple

from distca.cluster.process import end_with_parent
from distca.train.launch.machines import Machines

_TELL_AGAIN_S = 5.0
"""Ranks that are still starting hear of SIGUSR1 later."""
_ALONE_S = 20.0
"""From the end of a server that failed until ranks are ended, which by themselves end in seconds if they know of it."""
_SERVERS_S = 5.0
"""Servers without a model that are still there so long after their ranks are ended."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1)

FINISHED = "RUN_FINISHED"
"""The variable with the path of a file that rank 0 makes when no step of the run is left."""

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
    """Returns the command that starts ``program`` on every rank, and homes alone where there are servers.

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
        variables += _pool_nodes(machines)
        step = _Step(0, machines.home_nodes, machines.ranks_per_node)
        shell = 'trap "" USR1; export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"'
        return ["env", *variables, *_srun(step, machines, environment), *_shell(shell), *profiler, python, *program]
    # Of the Python that was checked, and not of another one on the PATH.
    torchrun = [python, "-m", "distca.cluster.torchrun", f"--nproc-per-node={machines.ranks_per_node}"]
    variables += _pool_nodes(machines)
    if machines.nodes > 1 or machines.servers:  # servers have to know where homes meet
        torchrun += [f"--nnodes={machines.home_nodes}", f"--node-rank={machines.node}"]
        torchrun += [f"--master-addr={machines.first}", f"--master-port={machines.port}"]
    else:
        torchrun += ["--standalone"]
    return ["env", *variables, *profiler, *torchrun, *program]


def servers_command(machines: Machines, python: str, environment: Mapping[str, str]) -> list[str]:
    """Returns the command that starts servers without a model: those of this machine, with Slurm all.

    Args:
        machines: where.
        python: the Python of every server.
        environment: all variables, with Slurm's.
    """
    variables = [f"MASTER_ADDR={machines.first}", f"MASTER_PORT={machines.port}", *_pool_nodes(machines)]
    if not machines.gpus:
        variables += [f"OMP_NUM_THREADS={environment.get('OMP_NUM_THREADS') or 1}", "CUDA_VISIBLE_DEVICES="]
    program = [python, "-m", "distca.train.run.serve"]
    behind = machines.ranks_per_node if machines.nodes == 1 else 0
    if machines.starter == "srun":
        step = _Step(machines.home_nodes, machines.nodes - machines.home_nodes or 1, machines.servers_per_node)
        gpu = f"$((SLURM_LOCALID / {machines.servers_per_gpu} + {behind}))"
        server = f"$SLURM_PROCID 1 {gpu} 1"
        shell = f'trap "" USR1; exec "$1" -m distca.cluster.server_processes {server} "$@"'
        return ["env", *variables, *_srun(step, machines, environment), *_shell(shell), *program]
    first = 0 if machines.nodes == 1 else (machines.node - machines.home_nodes) * machines.servers_per_node
    numbers = [str(number) for number in (first, machines.servers_per_node, behind, machines.servers_per_gpu)]
    return ["env", *variables, python, "-m", "distca.cluster.server_processes", *numbers, *program]


def _pool_nodes(machines: Machines) -> list[str]:
    return [f"POOL_NODES={machines.nodes}"] if machines.servers else []


class _Step(NamedTuple):
    """A step of a Slurm job: tasks on some of its nodes from ``first`` on, equally many on each."""

    first: int
    nodes: int
    tasks: int


def _srun(step: _Step, machines: Machines, environment: Mapping[str, str]) -> list[str]:
    words = ["srun", f"--nodes={step.nodes}", f"--ntasks={step.nodes * step.tasks}"]
    # Servers may go one by one (distca.cluster.server_processes).
    words += [f"--ntasks-per-node={step.tasks}", f"--kill-on-bad-exit={int(step.first == 0)}"]
    tasks = step.tasks
    if machines.servers and machines.nodes == 1:
        words.append("--overlap")  # homes and servers are two steps, and share the node
        tasks = machines.ranks_per_node + machines.servers_per_node
    elif machines.servers:
        words.append(f"--relative={step.first}")
    # Without this a task may get one core only. SLURM_JOB_CPUS_PER_NODE may read 64(x2).
    cores = re.match("[0-9]+", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if cores and int(cores[0]) >= tasks:
        words.append(f"--cpus-per-task={int(cores[0]) // tasks}")
    return words


def _shell(script: str) -> list[str]:
    """A shell in each task, in which Slurm's variables expand. SIGUSR1 ends no rank that is still starting."""
    return ["bash", "-c", script, "rank"]


@dataclass
class Ranks:
    """Ranks while they run, and servers without a model beside them.

    Attributes:
        words: the command that starts them.
        log: file that gets what they say, beside standard output; None leaves them the terminal.
        status: exit code, as a shell has it.
        stopped_by: the signal that ended them.
        asked_to_save: SIGUSR1 came, by which Slurm says that the job's time is nearly over.
        servers: the command that starts servers without a model beside them; empty without any. They end when ranks
            have ended, and ranks are ended that do not end by themselves after a server has failed.
    """

    words: Sequence[str]
    log: Path | None = None
    status: int = 0
    stopped_by: signal.Signals | None = None
    asked_to_save: bool = False
    servers: Sequence[str] = ()
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _servers: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def run(self) -> Ranks:
        """Start them and wait until they have ended.

        SIGUSR1 and a first SIGTERM go to the ranks, which save and end: torchrun would end them half a minute later.
        Any other signal ends them, as SIGTERM to torchrun or srun.
        """
        before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        self.asked_to_save |= bool(_told_early)  # it may have come in between, too
        try:
            output = None if self.log is None else subprocess.PIPE
            # Ctrl-C reaches the whole terminal; the ranks are told once, by this process.
            self._process = subprocess.Popen(
                self.words, stdout=output, stderr=output and subprocess.STDOUT, preexec_fn=_begin
            )
            if self.stopped_by:  # it came before there was a process to stop
                self._process.terminate()
            if self.servers:
                self._servers = subprocess.Popen(self.servers, preexec_fn=_begin)
            copied = self.log is None or _copy(self._process.stdout, self.log)
            code = self._wait()
        finally:
            self._end_servers()
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
            failed = self._servers is not None and bool(self._servers.poll())
            try:
                return self._process.wait(_ALONE_S if failed else _TELL_AGAIN_S)
            except subprocess.TimeoutExpired:
                if self.asked_to_save:
                    _tell_ranks(self._process.pid, signal.SIGUSR1)
                if failed:
                    self._process.terminate()

    def _end_servers(self) -> None:
        """Wait for servers, which homes have let go or which see that they are gone, and end those that stay."""
        if self._servers is None:
            return
        for end in (lambda: None, self._servers.terminate, self._servers.terminate, self._servers.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self._servers.wait(_SERVERS_S)
                return

    def _stop(self, number: int, _: FrameType | None) -> None:
        again, asks = self.stopped_by is not None, number in (signal.SIGTERM, signal.SIGUSR1)
        if number == signal.SIGUSR1:
            again = False
            self.asked_to_save = True
        else:
            self.stopped_by = signal.Signals(number)
        if self._process and not (asks and not again and _tell_ranks(self._process.pid, number)):
            self._process.terminate()


def _tell_ranks(starter: int, number: int) -> bool:
    """Send a signal to the ranks below a process; whether it was sent.

    Where there are none, SIGUSR1 goes to the process itself: srun passes it on, and torchrun ignores it."""
    told = False
    for process in _ranks_below(starter):
        with suppress(ProcessLookupError):
            os.kill(process, number)
            told = True
    if not told and number == signal.SIGUSR1:
        with suppress(ProcessLookupError):  # it has ended, and servers have not
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
