"""Predicts a step's end: gradients are reduced over data-parallel ranks, the optimizer runs, weights are gathered."""

from __future__ import annotations

from dataclasses import dataclass

from distca.simulate.fabric import Fabric
from distca.simulate.job import VALUE, WIDE, Job

_BESIDE_BACKWARD = 0.7
"""The rate of reducing gradients beside backward over that of an all-gather with nothing beside it, as in kept traces
of steps over NVLink (benchmarks/results/simulated.md)."""


@dataclass(frozen=True)
class StepEnd:
    """Seconds of a step after the last backward.

    Attributes:
        transfers: seconds of reducing gradients and gathering weights beside which nothing is computed.
        compute: seconds of the optimizer, and of scaling gradients and computing their norm.
    """

    transfers: float
    compute: float


def step_end(job: Job, backward_s: float, rows_on_links_s: float) -> StepEnd:
    """Returns the seconds of a step's end.

    Gradients are reduced in float32 during the last micro-batch's backward, while no rows of attention are on the
    links. Beside backward their rate is lower than after it. The embedding's gradient comes last, so its reduction is
    never hidden. With pipeline stages all gradients are reduced after backward. Weights are gathered after the
    optimizer.

    Args:
        job: the model, the cluster and the parallelism.
        backward_s: seconds of the last micro-batch's backward.
        rows_on_links_s: seconds of these in which rows of attention were on the links.
    """
    ranks, parameters, rates = job.data_parallel, job.parameters, job.rates
    experts, replicas = job.expert_parameters, job.expert_replicas
    compute = parameters / ranks * rates.optimizer_s + parameters * rates.parameter_s
    compute += experts / replicas * rates.optimizer_s + experts * rates.parameter_s
    if ranks == 1 and (replicas == 1 or not experts):
        return StepEnd(0.0, compute)
    rate, latency = job.fabric.ring(ranks)
    share = (ranks - 1) / ranks
    # GPUs with the same experts are ``ep`` GPUs apart.
    experts_rate, _ = Fabric.of(job.cluster, 1).ring(replicas, job.ep)
    of_experts = experts * (replicas - 1) / replicas / experts_rate
    reduced = WIDE * (parameters * share / rate + of_experts)
    if job.pp == 1:
        table = job.model.vocabulary * job.model.hidden // job.tp
        last = WIDE * table * share / rate
        reduced = max(last, reduced - _BESIDE_BACKWARD * max(backward_s - rows_on_links_s, 0.0))
    return StepEnd(reduced + VALUE * parameters * share / rate + VALUE * of_experts + 2 * latency, compute)
