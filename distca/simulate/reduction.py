"""The end of a step: gradients are reduced over data-parallel ranks, the optimizer runs, weights are gathered."""

from __future__ import annotations

from dataclasses import dataclass

from distca.simulate.fabric import Fabric
from distca.simulate.job import VALUE, WIDE, Job


@dataclass(frozen=True)
class StepEnd:
    """Seconds behind the last backward.

    Attributes:
        transfers: of gradients and weights, that nothing hides.
        compute: of the optimizer and of what is done with gradients.
    """

    transfers: float
    compute: float


def step_end(job: Job, backward_s: float, rows_on_links_s: float) -> StepEnd:
    """The end of a step.

    Gradients are reduced in float32 while the last micro-batch's backward runs, on what its rows leave of the links;
    the embedding's come last and are never hidden. With pipeline stages all are reduced behind backward. Weights are
    gathered behind the optimizer.

    Args:
        job: what runs.
        backward_s: seconds of the last micro-batch's backward.
        rows_on_links_s: of these, seconds in which rows of attention were on the links.
    """
    ranks, parameters, rates = job.data_parallel, job.parameters, job.rates
    experts, replicas = job.expert_parameters, job.expert_replicas
    compute = parameters / ranks * rates.optimizer_s + parameters * rates.parameter_s
    compute += experts / replicas * rates.optimizer_s + experts * rates.parameter_s
    if ranks == 1:
        return StepEnd(0.0, compute)
    rate, latency = job.fabric.ring(ranks)
    share = (ranks - 1) / ranks
    # Those of experts go over GPUs that are as far apart as there are others between them.
    experts_rate, _ = Fabric.of(job.cluster, 1).ring(replicas, job.ep)
    of_experts = experts * (replicas - 1) / replicas / experts_rate
    reduced = WIDE * parameters * share / rate + WIDE * of_experts
    if job.pp == 1:
        table = job.model.vocabulary * job.model.hidden // job.tp
        last = WIDE * table * share / rate
        reduced = max(last, reduced - max(backward_s - rows_on_links_s, 0.0))
    return StepEnd(reduced + VALUE * parameters * share / rate + VALUE * of_experts + 2 * latency, compute)
