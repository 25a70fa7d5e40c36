"""Reads this process's rank from the environment variables that a launcher sets; refuses impossible values.

Launchers are torchrun, pretrain_llama.sh and Slurm's srun.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distca.errors import LaunchError
from distca.words import count

_RESOLVE_S = 10.0
"""The longest time to look up the address of rank 0's node, in seconds."""
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class Launched:
    """The place of this process among the ranks of a run. The defaults are a process that no launcher started.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        local_rank: this process's number among the ranks of its node.
        address: name or address of rank 0's node; empty without a launcher.
        port: the port of that node at which ranks meet; 0 without a launcher.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """Returns this process's place among the ranks; without a launcher it is the only rank.

    Raises:
        LaunchError: a variable is missing or has an impossible value.
    """
    size = _number(environment, "WORLD_SIZE", 1)
    if size is None:
        return _alone(environment)
    rank = _number(environment, "RANK", 0, size - 1)
    if rank is None:
        raise LaunchError(
            f"WORLD_SIZE is {size}, but RANK is not set, so this process does not know which of the ranks it is.",
            "start the ranks with pretrain_llama.sh or torchrun, or unset WORLD_SIZE.",
        )
    port = _number(environment, "MASTER_PORT", 1, _LARGEST_PORT)
    address = environment.get("MASTER_ADDR", "")
    if size > 1 and not (address and port):
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        raise LaunchError(
            f"WORLD_SIZE is {size}, but {missing} is not set, so the ranks cannot meet.",
            "start the ranks with pretrain_llama.sh or torchrun, or set it alike on all of them.",
        )
    if address:
        _check_resolvable(address)
    return Launched(rank, size, _number(environment, "LOCAL_RANK", 0) or 0, address, port or 0)


@dataclass(frozen=True)
class ServerPlace:
    """The place of this process among the servers without a model, which compute attention for the ranks that train.

    Attributes:
        number: this server's number, from 0.
        local_rank: number of this server's GPU on its node.
        address: name or address of the node of rank 0.
        port: the port of that node at which ranks and servers meet.
    """

    number: int
    local_rank: int
    address: str
    port: int


def served(environment: Mapping[str, str] = os.environ) -> ServerPlace:
    """Returns this process's place among the servers without a model.

    Raises:
        LaunchError: a variable is missing or has an impossible value.
    """
    number, port = _number(environment, "SERVER", 0), _number(environment, "MASTER_PORT", 1, _LARGEST_PORT)
    address = environment.get("MASTER_ADDR", "")
    if number is None or not (address and port):
        missing = "SERVER" if number is None else "MASTER_PORT" if address else "MASTER_ADDR"
        raise LaunchError(
            f"{missing} is not set, so this server does not know which one it is, or where its homes are.",
            "start servers with SERVERS=8 bash pretrain_llama.sh, or set SERVER, MASTER_ADDR and MASTER_PORT.",
        )
    _check_resolvable(address)
    return ServerPlace(number, _number(environment, "LOCAL_RANK", 0) or 0, address, port)


def step_tasks(environment: Mapping[str, str]) -> int | None:
    """Returns the least number of tasks that srun has started together with this one; None where no variable tells.

    It reads several variables, as their presence depends on the version of Slurm and on srun's options."""
    names = ["SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"]
    if environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID"):
        # Only in a step does this variable count its tasks. Elsewhere it counts those of the job.
        names.append("SLURM_TASKS_PER_NODE")
    said = [_tasks(environment, name) for name in names if environment.get(name)]
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        number = environment.get(name, "")
        if number.isdecimal() and int(number) > 0:
            said.append(int(number) + 1)
    return max(said, default=None)


def _tasks(environment: Mapping[str, str], name: str) -> int:
    """Returns the number of tasks in a variable of Slurm, which may list them by node: "8(x2),4" is 20."""
    parts = re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?(?:,|$)", environment.get(name, ""))
    return sum(int(tasks) * int(nodes or 1) for tasks, nodes in parts)


def check_gpus_usable(usable: bool, version: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses to train on CPUs by accident: where there are GPUs, or the user asked for some, but torch has none.

    Args:
        usable: whether torch can use a GPU.
        version: torch's version, for the message.
        environment: this process's environment variables.

    Raises:
        LaunchError: torch cannot use a GPU, and the machine has one or the user asked for one.
    """
    if usable or environment.get("CUDA_VISIBLE_DEVICES") == "" or environment.get("GPUS_PER_NODE") == "0":
        return
    asked = environment.get("GPUS_PER_NODE", "")
    if asked or _has_gpus():
        there = f"GPUS_PER_NODE is {asked}" if asked else f"{socket.gethostname()} has GPUs"
        raise LaunchError(
            f"{there}, but torch {version} cannot use any.",
            "install a torch with CUDA that fits the driver (`distca doctor` shows both), or set GPUS_PER_NODE=0 or "
            "CUDA_VISIBLE_DEVICES= to train on CPUs.",
        )


def gpu_of(local_rank: int, visible: int) -> int:
    """Returns the number of a rank's GPU among those that the process sees. If it sees only one, it takes that.

    Args:
        local_rank: the rank's number on its node.
        visible: number of GPUs that the process sees.

    Raises:
        LaunchError: there are fewer GPUs than ranks of the node.
    """
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise LaunchError(
            f"This process is rank {local_rank} of its node (LOCAL_RANK) and sees {visible} GPUs.",
            "start as many ranks on a node as it has GPUs, or show each rank one of them or all.",
        )
    return local_rank


def _alone(environment: Mapping[str, str]) -> Launched:
    """Returns the place of the only rank; refuses variables which say that there are others."""
    if environment.get("RANK"):
        raise LaunchError(
            f"RANK is {environment['RANK']}, but WORLD_SIZE is not set, so this process does not know how many ranks "
            "there are.",
            "start the ranks with pretrain_llama.sh or torchrun, or unset RANK.",
        )
    tasks = step_tasks(environment)
    if tasks is None:
        tasks = max(_tasks(environment, name) for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"))
    if tasks > 1:
        raise LaunchError(
            f"Slurm has {count(tasks, 'task')} for this, but WORLD_SIZE is not set: each would train a run of one "
            "rank.",
            "use sbatch pretrain_llama.sh, or bash pretrain_llama.sh inside salloc, which start the ranks; for one "
            "rank ask Slurm for one task.",
        )
    return Launched()


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None = None) -> int | None:
    """Returns a variable's whole number, from ``least`` to ``most``; None where it is not set or empty."""
    value = environment.get(name)
    if not value:
        return None
    if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise LaunchError(f"{name} is '{value}'; it must be a whole number {limit}.")
    return int(value)


def _check_resolvable(address: str) -> None:
    """Refuses an address that cannot be looked up. torch would try for minutes, with a warning each time."""
    said: list[str] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(address, None)
            said.append("")
        except OSError as error:
            said.append(error.strerror or str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVE_S)
    reason = said[0] if said else f"no answer within {_RESOLVE_S:.0f} s"
    if reason:
        raise LaunchError(
            f"MASTER_ADDR is '{address}', and {socket.gethostname()} finds no node of that name ({reason}).",
            "set it to a name or an address of rank 0's node that all nodes can reach.",
        )


def _has_gpus() -> bool:
    """Whether NVIDIA's driver has a GPU, by files in /proc and /dev, so without CUDA."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) and any(Path("/dev").glob("nvidia[0-9]*"))
