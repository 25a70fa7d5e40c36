"""Servers of unlike speeds: attention planned as if all were alike, and by their speeds, measured and predicted.

    python -m benchmarks.server_speeds --gpus --output benchmarks/results/server_speeds_2_gpus.json    # two GPUs
    OMP_NUM_THREADS=1 python -m benchmarks.server_speeds --ranks 4 --output FILE                       # four CPU ranks

The last rank computes all attention twice, so that it serves at half the speed of the others, whatever its tasks are.
The same global batches of the Pretrain mix are trained on in both ways, layers of the 8B shape on GPUs. Attention alone
is levelled. Times are those of kernels on every rank, on CPUs in CPU seconds of its thread. Predicted are those of the
simulator for the very plans that ran, by the cost table that planned them, and the step. What speeds allow is all work
over the sum of speeds: with a half-speed server among two, 1 / 1.5 over 1, so two thirds of the slower one's time in
equal planning; among four 2 / 3.5.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.throughput.batches import draw_batches
from benchmarks.throughput.settings import Cell
from distca.attention import Kernel, TaskBatch
from distca.baselines import parse_mode
from distca.models.shape import ModelShape
from distca.plan import CostModel
from distca.plan.cost.linear import LinearRate
from distca.plan.cost.pool import PoolCost, at_speeds
from distca.plan.kinds import AttentionKind
from distca.simulate import Cluster, Job, Workload, simulate
from distca.testing.ranks import run_ranks
from distca.versions import command_line, header, write_report

TIMES = 2
"""How often the slow server computes its attention."""
WARM_UP = 2
"""Steps before those that are measured: kernels are compiled and memory grows."""
LEVELLED, RATIO, PREDICTED, LOSSES = 1.03, 0.75, 0.05, 1e-3
"""The most of: the slowest server over what speeds allow, its time over equal planning's, how far predictions are off,
and how far losses are apart."""


@dataclass(frozen=True)
class Setup:
    """The size of the runs.

    Attributes:
        ranks: how many.
        gpus: whether each has one.
        steps: measured ones.
        seed: of documents.
    """

    ranks: int
    gpus: bool
    steps: int
    seed: int

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a micro-batch."""
        return 65_536 if self.gpus else 4_096

    @property
    def shape(self) -> ModelShape:
        if self.gpus:
            return ModelShape(layers=2, hidden=4096, ffn=14_336, heads=32, kv_heads=8, vocabulary=32_000)
        return ModelShape(layers=2, hidden=128, ffn=128, heads=4, kv_heads=2, vocabulary=64)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Every server's."""
        return (*[1.0] * (self.ranks - 1), 1.0 / TIMES)


class Repeated:
    """A kernel that computes everything several times, and so takes as many times as long."""

    def __init__(self, kernel: Kernel, times: int) -> None:
        self.name, self._kernel, self._times = kernel.name, kernel, times

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(self._times):
            found = self._kernel.forward(q_THD, k_SGD, v_SGD, batch, kind)
        return found

    def backward(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for _ in range(self._times):
            found = self._kernel.backward(*given)
        return found


@dataclass(frozen=True)
class Measured:
    """One way to plan. Array legend: B steps, R ranks.

    Attributes:
        attention_s: [B, R] seconds of attention.
        step_s: [B] forward and backward.
        predicted_attention_s: [B, R] those of the simulator.
        predicted_step_s: [B] likewise.
        losses: [B] sums over all ranks.
    """

    attention_s: np.ndarray
    step_s: np.ndarray
    predicted_attention_s: np.ndarray
    predicted_step_s: np.ndarray
    losses: np.ndarray


def measure(setup: Setup) -> dict[str, Measured]:
    """Both ways, on every rank together."""
    if not setup.gpus:
        from megatron_patches.patches.cpu import use_cpu

        use_cpu()
    drawn = draw_batches(
        Cell("pretrain", setup.ranks * setup.tokens),
        setup.steps,
        ranks=setup.ranks,
        tokens_per_rank=setup.tokens,
        micro_batches=1,
        vocabulary=setup.shape.vocabulary,
        seed=setup.seed,
    )
    workloads = [Workload(each, drawn.bins) for each in drawn.global_batches]
    return {name: _way(setup, workloads, speeds) for name, speeds in (("equal", ()), ("by_speed", setup.speeds))}


def _way(setup: Setup, workloads: Sequence[Workload], speeds: tuple[float, ...]) -> Measured:
    import distca
    from megatron_patches.model.gpt import build_gpt, transformer_config
    from megatron_patches.ranks.groups import initialize_model_parallel
    from megatron_patches.training.training_step import summed_loss_step

    device = torch.device("cuda", torch.cuda.current_device()) if setup.gpus else torch.device("cpu")
    dtype = torch.bfloat16 if setup.gpus else torch.float32
    initialize_model_parallel(1, 1, setup.seed)  # both ways draw the same weights
    torch.manual_seed(setup.seed)
    config = transformer_config(setup.shape, dtype, recompute_mlp=setup.gpus)
    cad = distca.CAD(config, tokens_per_rank=setup.tokens, speeds=speeds, level="attention")
    if dist.get_rank() == setup.ranks - 1:
        cad.pool = replace(cad.pool, kernel=Repeated(cad.pool.kernel, TIMES))
    model = build_gpt(setup.shape, setup.shape.vocabulary, config, cad.block_spec())
    model = cad.data_parallel(cad.attach(model).to(device=device, dtype=dtype), distributed_optimizer=False)
    job = Job(
        setup.shape,
        Cluster(setup.ranks),
        at_speeds(_as_simulated(cad.options.cost), setup.speeds),
        tokens_per_rank=setup.tokens,
        recompute="mlp" if setup.gpus else "none",
    )
    found: list[tuple[Any, ...]] = []
    ids = np.random.default_rng(setup.seed).integers(0, setup.shape.vocabulary, setup.ranks * setup.tokens)
    for number, workload in enumerate([*workloads[:WARM_UP], *workloads]):
        (micro_batch,) = workload.micro_batches
        step = cad.plan_step([[ids[:length] for length in micro_batch.lengths]])
        cad.pool.timeline.clock.synchronize()
        began = time.perf_counter()
        reports = cad.forward_backward(step, summed_loss_step, model)
        loss = torch.stack([each[0] for each in reports]).sum().double()
        dist.all_reduce(loss)
        total = loss.item()  # waits for the device
        took = time.perf_counter() - began
        mine = torch.tensor([sum(map(sum, cad.pool.timeline.take_serves().values()))], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(setup.ranks)]
        dist.all_gather(everyone, mine)
        if number < WARM_UP:
            continue
        predicted = simulate(job, parse_mode("distca"), workload, plan=step.plan)
        found.append((torch.cat(everyone).numpy(), took, predicted.attention_s, predicted.step_s, total))
    return Measured(*(np.array(each) for each in zip(*found, strict=True)))


def _as_simulated(cost: CostModel) -> CostModel:
    """A server's table, as the simulator takes it: on CPUs linear layers were not measured, and rows are wider."""
    table = copy.copy(cost.tables[0] if isinstance(cost, PoolCost) else cost)
    table.shape = replace(table.shape, value_bytes=2)
    table.linear = table.linear or LinearRate(0.0, 0.0)
    return table


def compared(setup: Setup, found: dict[str, Measured]) -> dict[str, Any]:
    """Figures of both ways."""
    speeds = np.array(setup.speeds)
    equal, by_speed = found["equal"], found["by_speed"]

    def slowest(seconds: np.ndarray) -> np.ndarray:
        return np.asarray(seconds.max(axis=1))

    def allowed(seconds: np.ndarray) -> np.ndarray:
        """[B] seconds of all servers if each did work by its speed."""
        return np.asarray((seconds * speeds).sum(axis=1) / speeds.sum())

    level = slowest(by_speed.attention_s) / allowed(by_speed.attention_s)
    ratio = slowest(by_speed.attention_s).sum() / slowest(equal.attention_s).sum()
    predicted_level = slowest(by_speed.predicted_attention_s) / allowed(by_speed.predicted_attention_s)
    predicted = slowest(by_speed.predicted_attention_s).sum() / slowest(equal.predicted_attention_s).sum()
    off = {
        name: slowest(each.predicted_attention_s).sum() / slowest(each.attention_s).sum() - 1
        for name, each in found.items()
    }
    steps = {name: each.predicted_step_s.sum() / each.step_s.sum() - 1 for name, each in found.items()}
    return {
        "speeds": speeds.tolist(),
        "steps": setup.steps,
        "tokens_per_rank": setup.tokens,
        "layers": setup.shape.layers,
        "slowest_over_what_speeds_allow": {"mean": float(level.mean()), "most": float(level.max())},
        "predicted_slowest_over_what_speeds_allow": float(predicted_level.mean()),
        "attention_by_speed_over_equal": float(ratio),
        "predicted_attention_by_speed_over_equal": float(predicted),
        "least_that_speeds_allow_over_equal": float(setup.ranks / TIMES / speeds.sum()),
        "step_by_speed_over_equal": float(by_speed.step_s.sum() / equal.step_s.sum()),
        "predicted_attention_off": {name: float(each) for name, each in off.items()},
        "predicted_step_off": {name: float(each) for name, each in steps.items()},
        "losses_apart": float(np.abs(by_speed.losses / equal.losses - 1).max()),
        "each": {name: {key: value.tolist() for key, value in vars(each).items()} for name, each in found.items()},
    }


def missed(found: dict[str, Any], gpus: bool) -> list[str]:
    """The figures that are not as they should be; absolute predictions are for GPUs, whose cost tables were
    measured."""
    level = found["slowest_over_what_speeds_allow"]["mean"]
    ratio, predicted = found["attention_by_speed_over_equal"], found["predicted_attention_by_speed_over_equal"]
    wrong = {
        f"The slowest server takes {level:.3f} of what speeds allow, limit {LEVELLED}": level > LEVELLED,
        f"Planning by speeds takes {ratio:.3f} of equal planning's time, limit {RATIO}": ratio > RATIO,
        f"{predicted:.3f} of equal planning's time were predicted, and {ratio:.3f} measured": (
            abs(predicted / ratio - 1) > PREDICTED
        ),
        f"Losses are {found['losses_apart']:.1e} apart, limit {LOSSES:g}": found["losses_apart"] > LOSSES,
    }
    for name, off in found["predicted_attention_off"].items():
        wrong[f"Attention planned {name} was predicted {off:+.1%} off, limit {PREDICTED:.0%}"] = (
            gpus and abs(off) > PREDICTED
        )
    return [sentence for sentence, so in wrong.items() if so]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("--steps", type=int, default=6, help="measured ones")
    parser.add_argument("--seed", type=int, default=1234)
    given = parser.parse_args()
    logging.getLogger("distca").setLevel(logging.ERROR)
    setup = Setup(given.ranks, given.gpus, given.steps, given.seed)
    found = compared(setup, run_ranks(setup.ranks, measure, setup, timeout=300.0, gpus=setup.gpus)[0])
    write_report(given.output, header(command_line("python -m benchmarks.server_speeds"), setup.ranks) | found)
    wrong = missed(found, setup.gpus)
    for sentence in wrong:
        sys.stderr.write(sentence + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
