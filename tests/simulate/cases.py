"""Small jobs of the simulator, with costs that can be counted by hand."""

from typing import Any

import numpy as np

from distca.data.sampler import MicroBatch
from distca.plan import area_cost
from distca.plan.cost.analytic import AnalyticCost
from distca.plan.cost.linear import LinearRate
from distca.simulate import Cluster, Job, Rates, Workload, dense

NOTHING_ELSE = Rates(
    linear_factor=1.0,
    attention_factor=1.0,
    head_s=0.0,
    elementwise_s=0.0,
    rotation_s=0.0,
    copy_bytes_per_s=float("inf"),
    optimizer_s=0.0,
    parameter_s=0.0,
    step_s=0.0,
    phase_s=0.0,
    expert_layer_s=0.0,
)
"""Matrix products, core attention and bytes are all that takes time."""


def pair_cost(seconds: float = 1e-6, linear: float = 1e-9, heads: int = 2, kv_heads: int = 2) -> AnalyticCost:
    """``seconds`` per pair of query and key, forward; 2.5 times as long backward."""
    shape = area_cost(heads, kv_heads, 8).shape
    return AnalyticCost(shape, 1, (seconds, 0, 0), (2.5 * seconds, 0, 0), LinearRate(linear, 2 * linear))


def small_job(gpus: int = 2, *, layers: int = 2, pp: int = 1, cost: AnalyticCost | None = None, **options: Any) -> Job:
    """A model of 2 heads of size 8 on servers of one GPU each."""
    cluster = options.pop("cluster", None) or Cluster(gpus, options.pop("gpus_per_node", 8))
    model = dense(layers * pp, hidden=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocabulary=8)
    options = {"tokens_per_rank": 1000, "rates": NOTHING_ELSE} | options
    return Job(model, cluster, cost or pair_cost(), pp=pp, **options)


def documents(*micro_batches: list[tuple[int, int]], bins: int = 2) -> Workload:
    """Of (tokens, rank) pairs."""
    made = []
    for each in micro_batches:
        lengths, homes = (np.array(column, np.int64) for column in zip(*each, strict=True))
        made.append(MicroBatch(np.arange(len(each)), lengths, homes))
    return Workload(tuple(made), bins)
