"""Kills servers without a model at random moments of a step, starts new ones, and holds every loss against a run whose
servers leave and come at the same steps by schedule.

    OMP_NUM_THREADS=1 python -m benchmarks.server_kills                # 50 kills on CPU ranks; a few minutes

Two homes train a small model, and four servers serve them, over gloo on this machine. A thread of the first home kills
a server by SIGKILL after a random time, and starts another one. The second run takes its changes from the first one's
record. Losses are float64 sums of float32 losses, by home. They must be equal bit for bit.
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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.testing.ranks import forked, run_ranks
from distca.versions import command_line, versions, write_report

RESULTS = Path(__file__).parent / "results" / "server_kills.json"
HOMES, SERVERS, TOKENS, VOCABULARY = 2, 4, 512, 64


@dataclass(frozen=True)
class Kill:
    """One killed server.

    Attributes:
        step: in which it was killed.
        server: its number.
        exchange: how many exchanges of rows the first home had launched in the step.
        exchanges: that a whole step has.
        lasted_s: the step, with its repetition.
    """

    step: int
    server: int
    exchange: int
    exchanges: int
    lasted_s: float


@dataclass(frozen=True)
class Run:
    """What a home saw.

    Attributes:
        losses: by step.
        servers: by step, numbers of those that served it to the end.
        kills: on the first home; ``lasted_s`` is 0 where the step did not need the server any more.
        joins_s: from the start of a server to the first step that it serves, on the first home.
        step_s: of a step without a change, in the median.
    """

    losses: list[float]
    servers: list[tuple[int, ...]]
    kills: list[Kill] = field(default_factory=list)
    joins_s: list[float] = field(default_factory=list)
    step_s: float = 0.0


def server(folder: str, number: int) -> None:
    """The process of a server without a model."""
    torch.set_num_threads(1)
    from distca import serve

    serve(dist.FileStore(f"{folder}/homes"), number)
    os._exit(0)


class Servers:
    """The servers that the first home starts and kills."""

    def __init__(self, folder: str) -> None:
        self._folder, self._next = folder, 0
        self.processes: dict[int, BaseProcess] = {}
        self.begun: dict[int, float] = {}

    def start(self) -> int:
        """Start one; returns its number."""
        number, self._next = self._next, self._next + 1
        self.begun[number] = time.monotonic()
        self.processes[number] = forked(server, self._folder, number)
        return number

    def kill(self, number: int) -> None:
        """End one at once, in whatever it is."""
        process = self.processes.pop(number)
        assert process.pid is not None
        with suppress(ProcessLookupError):  # homes may have let it go
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def documents() -> Iterator[list[list[np.ndarray]]]:
    """Every step two micro-batches, the same on every home."""
    drawn = np.random.default_rng(1)
    while True:
        yield [[drawn.integers(0, VOCABULARY, each) for each in (TOKENS, *drawn.integers(1, 60, 8))] for _ in range(2)]


def home(folder: str, kills: int, schedule: list[tuple[int, ...]], seed: int, tp: int, pp: int) -> Run:
    """Train on one home: with random ``kills``, or, where there is one, by ``schedule``, servers by step."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/homes", rank=rank, world_size=HOMES)
    from distca.parity.cases import ParityCase, ParityShape
    from distca.parity.disaggregated import attached
    from distca.parity.unmodified import unmodified_model
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    servers = Servers(folder)
    for _ in range(SERVERS if rank == 0 else 0):
        servers.start()
    case = ParityCase(micro_batches=((HOMES * TOKENS,),), shape=ParityShape(layers=2), servers=SERVERS, tp=tp, pp=pp)
    made = unmodified_model(case, torch.float32)
    weights = {name: parameter.detach() for name, parameter in made.named_parameters()}
    cad, model = attached(case, torch.float32, torch.device("cpu"), "reference", weights)
    trainer = Trainer(cad, cad.data_parallel(model, distributed_optimizer=False), servers if rank == 0 else None)
    found = trainer.by_schedule(schedule) if schedule else trainer.with_kills(kills, seed)
    dist.barrier()
    for number in list(servers.processes):
        servers.kill(number)
    return found


class Trainer:
    """One home's training loop.

    Args:
        cad, model: this home's.
        servers: on the first home, which starts and kills them.
    """

    def __init__(self, cad: Any, model: Any, servers: Servers | None) -> None:
        self._cad, self._model, self._servers = cad, model, servers
        self._remote, self._launched = cad._remote, 0
        self._found = Run([], [])
        launch = self._remote.transport.launch

        def counted(parts: Any) -> Any:
            self._launched += 1
            return launch(parts)

        self._remote.transport.launch = counted

    def with_kills(self, kills: int, seed: int) -> Run:
        """Train until so many servers were killed, and others have taken their places."""
        drawn, usual = random.Random(seed), 0
        seconds: list[float] = []
        with closing(self._cad.plan_ahead(documents())) as steps:
            for step in steps:
                servers, before = self._remote.numbers, self._remote.generation
                done = len(self._found.kills) >= kills and self._all_live(servers)
                if self._all(done):
                    break
                killer = None
                if self._all_live(servers) and len(seconds) > 3 and not done:
                    wait, victim = drawn.uniform(0, 1.1) * float(np.median(seconds[-20:])), drawn.choice(servers)
                    killer = threading.Thread(target=self._kill, args=(victim, wait, usual))
                    killer.start()
                took = self._step(step)
                gone = set(servers) - set(self._remote.numbers)
                if killer is not None:
                    killer.join()
                    kill = self._found.kills[-1]
                    self._found.kills[-1] = replace(kill, lasted_s=took if gone else 0.0)
                elif self._remote.generation == before:
                    seconds.append(took)
                    usual = self._launched
                self._replace(gone)
                self._note_joins(servers)
        return replace(self._found, step_s=float(np.median(seconds)))

    def _replace(self, gone: set[int]) -> None:
        """Start a server for each that is gone, or was let go with one that is."""
        if self._servers is not None:
            for number in gone & set(self._servers.processes):
                self._servers.kill(number)
            for _ in gone:
                self._servers.start()

    def _all_live(self, servers: tuple[int, ...]) -> bool:
        """Whether all servers are there, none of which was killed without anybody having noticed yet."""
        return self._servers is not None and len(servers) == SERVERS and set(servers) == set(self._servers.processes)

    def by_schedule(self, schedule: list[tuple[int, ...]]) -> Run:
        """Train with the servers that ``schedule`` has in each step."""
        with closing(self._cad.plan_ahead(documents())) as steps:
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
        from megatron_patches.training.training_step import summed_loss_step

        began, self._launched = time.monotonic(), 0
        reports = self._cad.forward_backward(step, summed_loss_step, self._model)
        for weight in self._model.parameters():
            weight.data.sub_(0.1 * weight.main_grad)
        self._found.losses.append(float(sum(each[0] for each in reports)))
        self._found.servers.append(self._remote.numbers)
        return time.monotonic() - began

    def _kill(self, number: int, wait: float, usual: int) -> None:
        time.sleep(wait)
        assert self._servers is not None
        self._found.kills.append(Kill(len(self._found.losses), number, self._launched, usual, 0.0))
        self._servers.kill(number)

    def _note_joins(self, before: tuple[int, ...]) -> None:
        if self._servers is not None:
            new = set(self._found.servers[-1]) - set(before)
            self._found.joins_s.extend(time.monotonic() - self._servers.begun[number] for number in sorted(new))

    def _all(self, so: bool) -> bool:
        said = torch.tensor([float(so) if self._servers is not None else 0.0])
        dist.all_reduce(said)
        return bool(said.item())


def compared(kills: int, seed: int = 0, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """Figures of both runs.

    Raises:
        AssertionError: a loss differs.
    """
    runs: list[list[Run]] = []
    for schedule in (False, True):
        with tempfile.TemporaryDirectory(prefix="distca-kills-") as folder:
            wanted = runs[0][0].servers if schedule else []
            runs.append(run_ranks(HOMES, home, folder, kills, wanted, seed, tp, pp, timeout=120.0 + 30.0 * kills))
    killed, scheduled = runs
    for number, (one, other) in enumerate(zip(killed, scheduled, strict=True)):
        differ = [step for step, pair in enumerate(zip(one.losses, other.losses, strict=True)) if pair[0] != pair[1]]
        assert not differ, f"losses of home {number} differ in steps {differ}"
    first = killed[0]
    return {
        "homes": HOMES,
        "servers": SERVERS,
        "tp": tp,
        "pp": pp,
        "kills": len(first.kills),
        "steps": len(first.losses),
        "last_loss": first.losses[-1],
        "losses_equal_to_those_by_schedule": True,
        "step_s": first.step_s,
        "step_with_repetition_s": {
            "median": float(np.median([each.lasted_s for each in first.kills if each.lasted_s])),
            "most": max(each.lasted_s for each in first.kills),
        },
        "kills_noticed_in_their_step": sum(each.lasted_s > 0 for each in first.kills),
        "join_s": {"median": float(np.median(first.joins_s)), "most": max(first.joins_s)},
        "each": [asdict(each) for each in first.kills],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the two homes")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages of the two homes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    report = {"command": command_line("OMP_NUM_THREADS=1 python -m benchmarks.server_kills"), "versions": versions()}
    write_report(given.out, report | compared(given.kills, given.seed, given.tp, given.pp))
    return 0


if __name__ == "__main__":
    sys.exit(main())
