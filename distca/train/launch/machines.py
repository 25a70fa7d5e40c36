"""The machines on which ranks run: this one or several through torchrun, or the nodes of a Slurm job through srun."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from distca.cluster.environment import step_tasks
from distca.errors import LaunchError
from distca.train.config.environment import check_value
from distca.train.config.variable import COUNT, Launcher, Values
from distca.train.launch.say import say
from distca.words import count

LOOPBACK = "127.0.0.1"
_CPU_RANKS = 4  # on a machine without GPUs
# What Slurm says and is counted with.
_COUNTED = {
    "SLURM_STEP_NUM_TASKS": COUNT,
    "SLURM_JOB_NUM_NODES": COUNT,
    "SLURM_JOB_ID": Values("[1-9][0-9]{0,17}", "a whole number of at least 1 and at most 18 digits"),
}


@dataclass(frozen=True)
class Machines:
    """The ranks to start.

    Attributes:
        starter: the program that starts them.
        nodes: machines.
        gpus: of each machine; 0 takes CPU ranks.
        servers: servers without a model. On one machine they have its last GPUs, or are further CPU processes; of
            several machines the last ones have them, and nothing else.
        servers_per_gpu: servers that share a GPU.
        node: number of this machine; with Slurm 0.
        first: address of the first machine; empty where torchrun needs none.
        port: on it; empty where the starter finds one.
    """

    starter: Literal["srun", "torchrun"]
    nodes: int
    gpus: int
    node: int
    first: str
    port: str
    servers: int = 0
    servers_per_gpu: int = 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a machine that has ranks: homes, where there are servers without a model."""
        served = -(-self.servers // self.servers_per_gpu) if self.nodes == 1 else 0
        return self.gpus - served if self.gpus else _CPU_RANKS

    @property
    def world_size(self) -> int:
        return self.home_nodes * self.ranks_per_node

    @property
    def home_nodes(self) -> int:
        """Machines with ranks, the first ones."""
        return self.nodes - (self.servers // self.servers_per_node if self.servers and self.nodes > 1 else 0)

    @property
    def servers_per_node(self) -> int:
        """Servers of a machine that has some."""
        return self.servers if self.nodes == 1 else self.servers_per_gpu * (self.gpus or _CPU_RANKS)

    @property
    def serves(self) -> bool:
        """Whether servers are started from this machine."""
        return bool(self.servers) and (self.nodes == 1 or self.starter == "srun" or self.node >= self.home_nodes)

    def check_servers(self) -> None:
        """Refuse servers without a model that leave no rank, do not fill machines, or have no GPU to share.

        Raises:
            LaunchError: SERVERS or SERVERS_PER_GPU does so.
        """
        if self.servers_per_gpu > 1 and not (self.gpus and self.servers):
            raise LaunchError(
                f"SERVERS_PER_GPU is {self.servers_per_gpu}, but there are {count(self.servers, 'server')} without a "
                f"model (SERVERS), and {count(self.gpus, 'GPU')} of a machine.",
                "unset SERVERS_PER_GPU.",
            )
        if self.nodes > 1 and self.servers % self.servers_per_node:
            raise LaunchError(
                f"SERVERS is {self.servers}, but of several machines servers without a model fill whole ones, of "
                f"{self.servers_per_node} each.",
                f"set SERVERS to a multiple of {self.servers_per_node}.",
            )
        if self.ranks_per_node < 1 or self.home_nodes < 1:
            raise LaunchError(
                f"SERVERS is {self.servers}, and {count(self.nodes, 'machine')} with {count(self.gpus, 'GPU')} each "
                "leave none for ranks with a model.",
                "lower SERVERS, or raise NNODES or GPUS_PER_NODE.",
            )

    def check_divisible(self, sizes: Mapping[str, int]) -> None:
        """Refuse ranks that cannot be divided by the product of ``sizes``, given by the variables' names.

        Raises:
            LaunchError: it does not divide them.
        """
        product = 1
        for size in sizes.values():
            product *= size
        if self.world_size % product:
            ranks = f"The {count(self.world_size, 'rank')} ({count(self.home_nodes, 'node')} × {self.ranks_per_node})"
            raise LaunchError(
                f"{ranks} cannot be divided by {' × '.join(sizes)} = {product}.",
                f"change {', '.join(sizes)}, NNODES or GPUS_PER_NODE.",
            )


def find_machines(launcher: Launcher, values: Mapping[str, str], environment: Mapping[str, str]) -> Machines:
    """The machines that variables and Slurm name.

    Args:
        launcher: who asks, for its messages.
        values: the launcher's variables.
        environment: all variables, with Slurm's.

    Raises:
        LaunchError: machines that contradict each other, or of which something is missing.
    """
    found = _of_slurm if environment.get("SLURM_JOB_ID") else _of_torchrun
    servers, sharing = int(values.get("SERVERS", 0)), int(values.get("SERVERS_PER_GPU", 1))
    machines = replace(found(launcher.value, values, environment), servers=servers, servers_per_gpu=sharing)
    machines.check_servers()
    return machines


def _of_torchrun(script: str, values: Mapping[str, str], environment: Mapping[str, str]) -> Machines:
    nodes, node, here = int(values.get("NNODES", 1)), int(values.get("NODE_RANK", 0)), gpus_here()
    gpus = int(values.get("GPUS_PER_NODE", here))
    if gpus > here:
        raise LaunchError(
            f"GPUS_PER_NODE is {gpus}, but this machine has {count(here, 'GPU')}.", "lower or unset GPUS_PER_NODE."
        )
    if node >= nodes:  # also of one: each machine would train a run of its own
        raise LaunchError(
            f"NODE_RANK is {node}, but NNODES is {nodes}; numbers start at 0.",
            "set NNODES to the number of machines (it is 1 if unset), or lower or unset NODE_RANK.",
        )
    if nodes == 1 and "SERVERS" in values:
        return Machines("torchrun", 1, gpus, 0, LOOPBACK, values.get("MASTER_PORT", str(free_port())))
    if nodes == 1:
        return Machines("torchrun", 1, gpus, 0, "", "")
    if not {"MASTER_ADDR", "NODE_RANK"} <= values.keys():
        raise LaunchError(
            f"NNODES is {nodes} outside Slurm, but MASTER_ADDR and NODE_RANK are not both set.",
            "start the script on each machine, with the first one's address and the machine's own number in them.",
        )
    return Machines("torchrun", nodes, gpus, node, values["MASTER_ADDR"], values.get("MASTER_PORT", "29500"))


def _of_slurm(script: str, values: Mapping[str, str], environment: Mapping[str, str]) -> Machines:
    for name, allowed in _COUNTED.items():
        if environment.get(name):
            check_value(name, environment[name], allowed)
    start_it = f"use sbatch {script}, or bash {script} inside salloc"
    tasks, names = step_tasks(environment) or 1, environment.get("SLURM_JOB_NODELIST")
    if tasks > 1:
        raise LaunchError(f"srun started this script {tasks} times, but it starts the ranks itself.", f"{start_it}.")
    if not shutil.which("scontrol"):
        raise LaunchError(
            "This is a Slurm job, but Slurm's scontrol is not on PATH.",
            "add the folder of Slurm's commands to PATH, or unset SLURM_JOB_ID to use this machine alone.",
        )
    if not names:
        raise LaunchError(
            "This is a Slurm job, but SLURM_JOB_NODELIST does not name its machines.",
            f"{start_it}, or unset SLURM_JOB_ID to use this machine alone.",
        )
    hosts = _hosts(names)
    nodes = int(environment.get("SLURM_JOB_NUM_NODES") or len(hosts))
    if nodes != len(hosts):
        raise LaunchError(
            f"SLURM_JOB_NUM_NODES is {nodes}, but SLURM_JOB_NODELIST {names} names {count(len(hosts), 'machine')}.",
            "leave both as Slurm sets them.",
        )
    if int(values.get("NNODES", nodes)) != nodes:
        raise LaunchError(
            f"NNODES is {values['NNODES']}, but the Slurm job has {count(nodes, 'node')}.",
            f"unset NNODES, or ask Slurm for --nodes={values['NNODES']}.",
        )
    if int(values.get("NODE_RANK", 0)):
        raise LaunchError(
            f"NODE_RANK is {values['NODE_RANK']}, but Slurm numbers the machines of its job.", "unset NODE_RANK."
        )
    gpus = _asked_of_job(values, environment) if "GPUS_PER_NODE" in values else _gpus_of_job(environment, nodes)
    port = values.get("MASTER_PORT", str(20_000 + int(environment["SLURM_JOB_ID"]) % 20_000))
    return Machines("srun", nodes, gpus, 0, values.get("MASTER_ADDR", hosts[0]), port)


def _hosts(names: str) -> list[str]:
    """The machines that a list of Slurm's names, such as ``node[1-2]``."""
    shown = subprocess.run(["scontrol", "show", "hostnames", names], stdout=subprocess.PIPE, text=True)
    if shown.returncode or not shown.stdout:
        raise LaunchError("scontrol does not name the job's machines.")
    return shown.stdout.splitlines()


def _each(gpus: int, nodes: int, name: str) -> int:
    if gpus % nodes:
        raise LaunchError(
            f"{name} is {gpus}, which {count(nodes, 'node')} cannot share equally.", "ask Slurm for --gpus-per-node."
        )
    return gpus // nodes


def _asked_of_job(values: Mapping[str, str], environment: Mapping[str, str]) -> int:
    """Returns GPUS_PER_NODE, which may be fewer than the job has, but not more.

    Slurm's count is not held against it if it is 0, as on a login node, or of several types (``h100:4,a100:4``)."""
    asked, said = int(values["GPUS_PER_NODE"]), environment.get("SLURM_GPUS_ON_NODE", "")
    has = "" if "," in said else said.rpartition(":")[2]
    if has.isdecimal() and 0 < int(has) < asked:
        raise LaunchError(
            f"GPUS_PER_NODE is {asked}, but the Slurm job has {count(int(has), 'GPU')} on a machine.",
            f"lower or unset GPUS_PER_NODE, or ask Slurm for --gpus-per-node={asked}.",
        )
    return asked


def _gpus_of_job(environment: Mapping[str, str], nodes: int) -> int:
    """GPUs of a node. Inside salloc this may be a login node, so Slurm's own count is first.

    It may read ``h100:8``, ``h100:4,a100:4``, or 0 on a login node, where it says nothing of the job."""
    set_it = "set GPUS_PER_NODE to the GPUs of a machine, 0 for CPU ranks."
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS"):
        said = environment.get(name)
        if said:
            of_types = [each.rpartition(":")[2] for each in said.split(",")]
            if not all(re.fullmatch("0|[1-9][0-9]{0,8}", each) for each in of_types):
                raise LaunchError(f"{name} is '{said}', which names no number of GPUs.", set_it)
            if gpus := sum(map(int, of_types)):
                return gpus if name != "SLURM_GPUS" else _each(gpus, nodes, name)
    # Of --gres nothing is said outside the job's steps.
    shown = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", environment["SLURM_JOB_ID"]], stdout=subprocess.PIPE, text=True
    )
    if allocated := re.search("TRES=[^ ]*gres/gpu=([0-9]{1,9})", shown.stdout):
        return _each(int(allocated[1]), nodes, "The job's number of GPUs")
    here = gpus_here()
    if not here:
        say(
            "Slurm names no GPUs for this job and this machine has none, so ranks run on CPUs; if the job's machines "
            "have GPUs, set GPUS_PER_NODE."
        )
    return here


def free_port(address: str = LOOPBACK) -> int:
    """Returns a port of ``address`` on which no process listens.

    The port may be used seconds later. So it is not one that systems give to connections, which start at 32768."""
    for port in random.sample(range(20_000, 32_768), 100):
        with suppress(OSError), socket.create_server((address, port)):
            return port
    raise LaunchError(f"100 ports of {address} from 20000 to 32767 are all taken.", "set MASTER_PORT to a free port.")


def gpus_here() -> int:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES shows; 0 where there is no driver."""
    try:
        shown = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return 0
    gpus = sum(line.startswith("GPU ") for line in shown.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    # CUDA takes them up to the first that is not there; some are named by their unique id. NoDevFiles is Slurm's none.
    named = takewhile(
        lambda name: name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < gpus),
        map(str.strip, visible.split(",")),
    )
    return min(gpus, len(list(named)))
