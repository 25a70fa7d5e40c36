"""Ends or stops servers without a model at random moments of a step, and starts new ones. Every loss is compared with
that of a run whose servers leave and come at the same steps by schedule.

    OMP_NUM_THREADS=1 python -m benchmarks.server_kills                 # 50 kills on CPU ranks; a few minutes
    OMP_NUM_THREADS=1 python -m benchmarks.server_kills --kills 0 --stops 2 --out FILE
    OMP_NUM_THREADS=1 python -m benchmarks.server_kills --ep 2 --out FILE  # homes share experts, servers have none
    OMP_NUM_THREADS=1 python -m benchmarks.server_kills --pattern GM-*- --out FILE  # two layers are recurrent
    python -m benchmarks.server_kills --gpus --homes 1 --servers 1 --sockets --kills 2 --out FILE
    python -m benchmarks.server_kills --gpus --homes 1 --servers 1 --sockets --kills 0 --stops 1 --out FILE

On CPUs homes train a small model, and servers serve them, over gloo on this machine. With ``--gpus`` every home and
server has a GPU, and rows go by NCCL: as between nodes over ``--sockets``, else as GPUs are connected. A thread of the
first home loses a server after a random time, and starts another one. Lost is a server that is killed by SIGKILL, or
one that is stopped by SIGSTOP. Like a lost node, the latter closes no connection. The second run takes its changes
from the first one's record. Losses are float64 sums of float32 losses, by home. They must be equal bit for bit. With
experts so must their biases, and the rows that each got.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from distca.testing.ranks import forked, run_ranks
from distca.testing.shared_gpus import each_a_machine
from distca.transport.collective import nccl_goes_first
from distca.versions import command_line, header, write_report

RESULTS = Path(__file__).parent / "results" / "server_kills.json"
VOCABULARY = 64
ROUTER = "sigmoid, bias, groups, scaling"
"""The router of a model with experts: a step moves its biases by the rows that experts got."""
RECURRENT = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 8},
}
"""Widths of gated delta nets and Mamba-2 in a HybridModel, as fields of Megatron's configuration."""
How = Literal["killed", "stopped"]
KILLED_S, STOPPED_S, JOIN_S = 20.0, 60.0, 20.0
"""Seconds in which a step must be over that loses a server, with its repetition, and in which a server must join."""


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


@dataclass(frozen=True)
class Loss:
    """One lost server.

    Attributes:
        step: in which it was lost.
        server: its number.
        how: killed or stopped.
        exchange: how many exchanges of rows the first home had launched in the step.
        exchanges: that a whole step has.
        lasted_s: the step that found it gone, with its repetition.
        in_its_step: whether that was the same step, which still needed the server.
    """

    step: int
    server: int
    how: How
    exchange: int
    exchanges: int
    lasted_s: float = 0.0
    in_its_step: bool = False


@dataclass(frozen=True)
class Run:
    """The record of a home.

    Attributes:
        losses: by step.
        servers: by step, numbers of those that served it to the end.
        experts: by step, biases of experts and the rows that each got, of all layers with experts.
        lost: on the first home.
        joins_s: from the start of a server to the end of the first step that it serves, on the first home.
        joins_asked_s: the same from the step before which it asked to be let in.
        step_s: of a step without a change, in the median.
    """

    losses: list[float]
    servers: list[tuple[int, ...]]
    experts: list[list[float]] = field(default_factory=list)
    lost: list[Loss] = field(default_factory=list)
    joins_s: list[float] = field(default_factory=list)
    joins_asked_s: list[float] = field(default_factory=list)
    step_s: float = 0.0


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


def documents(room: int) -> Iterator[list[list[np.ndarray]]]:
    """Every step two micro-batches of at most ``room`` tokens, the same on every home: a long document and short
    ones."""
    drawn, longest = np.random.default_rng(1), room - 512
    while True:
        yield [[drawn.integers(0, VOCABULARY, each) for each in (longest, *drawn.integers(1, 60, 8))] for _ in range(2)]


def home(folder: str, ways: list[How], schedule: list[tuple[int, ...]], seed: int, setup: Setup) -> Run:
    """Train on one home: with servers lost in these ``ways``, or, where there is one, by ``schedule``, servers by
    step."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    device = setup.take_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if setup.gpus else "gloo",
        init_method=f"file://{folder}/homes",
        rank=rank,
        world_size=setup.homes,
    )
    from distca.parity.cases import ParityCase, ParityShape
    from distca.parity.disaggregated import attached
    from distca.parity.experts import expert_case, set_biases
    from distca.parity.unmodified import unmodified_model
    from megatron_patches.patches.cpu import use_cpu

    if not setup.gpus:
        use_cpu()
    servers = Servers(folder, setup)
    for _ in range(setup.servers if rank == 0 else 0):
        servers.start()
    usual: dict[str, Any] = {
        "micro_batches": ((setup.homes * setup.tokens,),),
        "shape": ParityShape(**setup.sizes),
        "servers": setup.servers,
        "tp": setup.tp,
        "pp": setup.pp,
    }
    if setup.pattern:
        usual |= {"pattern": setup.pattern, "config": RECURRENT}
    case = expert_case(ROUTER, ep=setup.ep, **usual) if setup.ep else ParityCase(**usual)
    made = unmodified_model(case, torch.float32)
    weights = {name: parameter.detach() for name, parameter in made.named_parameters()}
    dtype = torch.bfloat16 if setup.gpus else torch.float32
    cad, model = attached(case, dtype, device, "auto", weights, deterministic=True)
    set_biases(model)
    trainer = Trainer(setup, cad, cad.data_parallel(model, distributed_optimizer=False), servers if rank == 0 else None)
    found = trainer.by_schedule(schedule) if schedule else trainer.with_losses(ways, seed)
    dist.barrier()
    trainer._remote.transport.give_up()  # while its servers live: NCCL would wait for them
    servers.end_stopped()
    for number in list(servers.processes):
        servers.lose(number)
    return found


class Trainer:
    """One home's training loop.

    Args:
        setup: the pool.
        cad, model: this home's.
        servers: on the first home, which starts and loses them.
    """

    def __init__(self, setup: Setup, cad: Any, model: Any, servers: Servers | None) -> None:
        self._setup, self._cad, self._model, self._servers = setup, cad, model, servers
        self._asked: dict[int, float] = {}
        self._remote, self._launched = cad._remote, 0
        self._found = Run([], [])
        launch = self._remote.transport.launch

        def counted(parts: Any) -> Any:
            self._launched += 1
            return launch(parts)

        self._remote.transport.launch = counted

    def with_losses(self, ways: list[How], seed: int) -> Run:
        """Train until servers were lost in all ``ways``, and others have taken their places."""
        drawn, usual = random.Random(seed), 0
        seconds: list[float] = []
        with closing(self._cad.plan_ahead(documents(self._setup.homes * self._setup.tokens))) as steps:
            for step in steps:
                servers, before = self._remote.numbers, self._remote.generation
                self._note_comers()
                done = len(self._found.lost) >= len(ways) and self._all_live(servers)
                if self._all(done):
                    break
                killer = None
                if self._all_live(servers) and len(seconds) > 3 and not done:
                    wait, victim = drawn.uniform(0, 1.1) * float(np.median(seconds[-20:])), drawn.choice(servers)
                    killer = threading.Thread(
                        target=self._lose, args=(victim, ways[len(self._found.lost)], wait, usual)
                    )
                    killer.start()
                took = self._step(step)
                gone = set(servers) - set(self._remote.numbers)
                if killer is not None:
                    killer.join()
                elif self._remote.generation == before:
                    seconds.append(took)
                    usual = self._launched
                for at, each in enumerate(self._found.lost):
                    if each.server in gone:
                        self._found.lost[at] = replace(each, lasted_s=took, in_its_step=killer is not None)
                self._replace(gone)
                self._note_joins(servers)
        return replace(self._found, step_s=float(np.median(seconds)))

    def _replace(self, gone: set[int]) -> None:
        """Start a server for each that is gone, or was let go with one that is."""
        if self._servers is not None:
            if gone:
                self._servers.end_stopped()
            for number in gone & set(self._servers.processes):
                self._servers.lose(number)
            for _ in gone:
                self._servers.start()

    def _all_live(self, servers: tuple[int, ...]) -> bool:
        """Whether all servers are there, none of which was lost without anybody having noticed yet."""
        if self._servers is None or len(servers) != self._setup.servers:
            return False
        return set(servers) == set(self._servers.processes)

    def by_schedule(self, schedule: list[tuple[int, ...]]) -> Run:
        """Train with the servers that ``schedule`` has in each step."""
        with closing(self._cad.plan_ahead(documents(self._setup.homes * self._setup.tokens))) as steps:
            for wanted, step in zip(schedule, steps, strict=False):
                for number in set(self._remote.numbers) - set(wanted):
                    self._cad.let_server_go(number)
                self._wait_for(len(set(wanted) - set(self._remote.numbers)))
                self._step(step)
                assert self._found.servers[-1] == wanted, (self._found.servers[-1], wanted)
        return self._found

    def _wait_for(self, more: int) -> None:
        """Start servers, and wait until they ask to be let in."""
        if self._servers is not None and more:
            until = self._remote._store.count("comers") + more
            for _ in range(more):
                self._servers.start()
            while self._remote._store.count("comers") < until:
                time.sleep(0.01)
        dist.barrier()

    def _step(self, step: Any) -> float:
        from megatron.core.utils import unwrap_model

        from distca.parity.experts import biases_of
        from megatron_patches.training.training_step import summed_loss_step

        began, self._launched = time.monotonic(), 0
        reports = self._cad.forward_backward(step, summed_loss_step, self._model)
        for weight in self._model.parameters():
            weight.data.sub_(0.1 * weight.main_grad)
        self._found.losses.append(float(sum(each[0] for each in reports)))
        self._found.servers.append(self._remote.numbers)
        if self._setup.ep:
            loads = self._cad.expert_loads(self._model)
            of_layers = [
                *biases_of(unwrap_model(self._model)).values(),
                *(loads[each].rows_E for each in sorted(loads)),
            ]
            self._found.experts.append(torch.cat([each.cpu().flatten() for each in of_layers]).tolist())
        return time.monotonic() - began

    def _lose(self, number: int, how: How, wait: float, usual: int) -> None:
        time.sleep(wait)
        assert self._servers is not None
        self._found.lost.append(Loss(len(self._found.losses), number, how, self._launched, usual))
        self._servers.lose(number, how)

    def _note_comers(self) -> None:
        """Note who has asked to be let in since the step before."""
        if self._servers is not None:
            for each in range(len(self._asked), self._remote._store.count("comers")):
                self._asked[self._remote._store.take(f"comer/{each}").number] = time.monotonic()

    def _note_joins(self, before: tuple[int, ...]) -> None:
        if self._servers is not None:
            now = time.monotonic()
            for number in sorted(set(self._found.servers[-1]) - set(before)):
                self._found.joins_s.append(now - self._servers.begun[number])
                self._found.joins_asked_s.append(now - self._asked.get(number, now))

    def _all(self, so: bool) -> bool:
        said = torch.tensor([float(so) if self._servers is not None else 0.0])
        dist.all_reduce(said)
        return bool(said.item())


def compared(ways: list[How], setup: Setup, seed: int = 0) -> dict[str, Any]:
    """Figures of both runs.

    Raises:
        AssertionError: a loss differs, or a bias or load of experts.
    """
    runs: list[list[Run]] = []
    for schedule in (False, True):
        with tempfile.TemporaryDirectory(prefix="distca-kills-") as folder:
            wanted = runs[0][0].servers if schedule else []
            patience = 120.0 + 30.0 * len(ways)
            runs.append(run_ranks(setup.homes, home, folder, ways, wanted, seed, setup, timeout=patience))
    lost, scheduled = runs
    for number, (one, other) in enumerate(zip(lost, scheduled, strict=True)):
        differ = [step for step, pair in enumerate(zip(one.losses, other.losses, strict=True)) if pair[0] != pair[1]]
        assert not differ, f"losses of home {number} differ in steps {differ}"
        assert one.experts == other.experts, f"biases or loads of experts on home {number} differ"
    first = lost[0]
    return {
        **asdict(setup),
        "steps": len(first.losses),
        "last_loss": first.losses[-1],
        "losses_equal_to_those_by_schedule": True,
        **({"biases_and_loads_of_experts_equal": True} if setup.ep else {}),
        "step_s": first.step_s,
        **{how: _figures([each for each in first.lost if each.how == how]) for how in dict.fromkeys(ways)},
        "join_s": _spread(first.joins_s),
        "join_from_asking_s": _spread(first.joins_asked_s),
        "each": [asdict(each) for each in first.lost],
    }


def _figures(lost: list[Loss]) -> dict[str, Any]:
    return {
        "servers": len(lost),
        "found_in_their_step": sum(each.in_its_step for each in lost),
        "step_with_repetition_s": _spread([each.lasted_s for each in lost]),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median": float(np.median(seconds)), "most": max(seconds)} if seconds else {}


def missed(found: dict[str, Any]) -> list[str]:
    """The changes that took longer than they may."""
    took = {how: found.get(how, {}).get("step_with_repetition_s", {}).get("most", 0.0) for how in ("killed", "stopped")}
    took["join"] = found["join_s"].get("most", 0.0)
    limits = {"killed": KILLED_S, "stopped": STOPPED_S, "join": JOIN_S}
    return [f"{what} took {took[what]:.1f} s, limit {most:g}" for what, most in limits.items() if took[what] > most]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="servers that are killed")
    parser.add_argument("--stops", type=int, default=0, help="servers that are stopped, as if their node were lost")
    parser.add_argument("--seed", type=int, default=0)
    for name, default in (("homes", 2), ("servers", 4), ("tp", 1), ("pp", 1), ("ep", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pattern", default="", help="layers of a HybridModel, without --ep and --gpus")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each home and server, and NCCL")
    parser.add_argument("--sockets", action="store_true", help="every GPU is a machine of its own to NCCL")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if not given.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    setup = Setup(given.homes, given.servers, given.tp, given.pp, given.ep, given.pattern, given.gpus, given.sockets)
    ways: list[How] = [*["killed"] * given.kills, *["stopped"] * given.stops]  # type: ignore[list-item]
    report = header(command_line("python -m benchmarks.server_kills"), setup.homes + setup.servers)
    found = compared(ways, setup, given.seed)
    write_report(given.out, report | found)
    for sentence in missed(found):
        sys.stderr.write(sentence + "\n")
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
