"""One home of :mod:`benchmarks.server_kills`: it trains while servers without a model are lost and others come."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.server_kills_pool import How, Servers, Setup

VOCABULARY = 64
ROUTER = "sigmoid, bias, groups, scaling"
"""The router of a model with experts: a step moves its biases by the rows that experts got."""
RECURRENT = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 8},
}
"""Widths of gated delta nets and Mamba-2 in a HybridModel, as fields of Megatron's configuration."""


@dataclass(frozen=True)
class LostServer:
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
    lost: list[LostServer] = field(default_factory=list)
    joins_s: list[float] = field(default_factory=list)
    joins_asked_s: list[float] = field(default_factory=list)
    step_s: float = 0.0


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
    found = trainer.by_schedule(schedule) if schedule else trainer.losing_servers(ways, seed)
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

    def losing_servers(self, ways: list[How], seed: int) -> Run:
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
        self._found.lost.append(LostServer(len(self._found.losses), number, how, self._launched, usual))
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
