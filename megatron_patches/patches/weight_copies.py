"""Copies the distributed optimizer's float32 weights to the model's weights, in a few launches.

Megatron-Core's own function launches a copy for each weight. A model with experts has hundreds of small weights.
"""

from __future__ import annotations

from itertools import chain

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_one_by_one = DistributedOptimizer._copy_main_params_to_model_params


def copy_weights_together() -> None:
    """Replaces Megatron's own function in this process."""
    if DistributedOptimizer._copy_main_params_to_model_params is _one_by_one:
        DistributedOptimizer._copy_main_params_to_model_params = _together


@torch.no_grad()
def _together(optimizer: DistributedOptimizer) -> None:
    if not _copies_each(optimizer):
        _one_by_one(optimizer)
        return
    given, into = [], []
    shards = optimizer.shard_fp32_from_float16_groups + optimizer.shard_fp32_groups
    weights = optimizer.model_float16_groups + optimizer.model_fp32_groups
    for shard, weight in zip(chain(*shards), chain(*weights), strict=True):
        place = optimizer._get_model_param_range_map(weight)["gbuf_world_in_bucket"]
        buffer, _, bucket = optimizer.model_param_gbuf_map[weight]
        given.append(shard)
        into.append(optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)[place.start : place.end])
    if into:
        torch._foreach_copy_(into, given)


def _copies_each(optimizer: DistributedOptimizer) -> bool:
    """Whether Megatron's own function would copy every weight, and do nothing else."""
    of_model, config = optimizer.ddp_config, optimizer.config
    quantizes = of_model.fp8_param_gather or getattr(of_model, "fp4_param_gather", False)
    keeps_elsewhere = of_model.use_megatron_fsdp or config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return not (optimizer.is_stub_optimizer or quantizes or keeps_elsewhere)
