"""One training step of megatron-core: forward and backward over the micro-batches, a token-weighted global loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

from megatron_patches.micro_batch import DisaggregatedMicroBatch, PackedMicroBatch


@dataclass(frozen=True)
class DeviceBatch:
    """One rank's part of a micro-batch, on its device.

    Attributes:
        tokens: [1, rows] int64.
        labels: [1, rows] int64 next token of the same document.
        loss_mask: [rows] bool; false where there is no next token, and in padding.
        positions: [rows] int64 position in the document.
        micro_batch: how its core attention runs; for a stock model a [1, 1, rows, rows] mask of hidden scores.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    micro_batch: DisaggregatedMicroBatch | PackedMicroBatch | torch.Tensor


def wrap_for_data_parallel(model: GPTModel, distributed_optimizer: bool) -> DistributedDataParallel:
    """Cast to bfloat16 where the configuration says so, and add gradient reduction over data-parallel ranks.

    Gradients are reduced in float32 after backward: recomputed segments run in nested backward passes that touch a
    weight several times, so a hook on the first touch cannot start the reduction.
    """
    config = model.config
    module = Float16Module(config, model) if config.bf16 else model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=distributed_optimizer,
        check_for_nan_in_grad=False,
    )
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp_config, module=module)
    config.finalize_model_grads_func = finalize_model_grads
    wrapped.broadcast_params()
    return wrapped


def run_micro_batches(
    model: DistributedDataParallel, batches: Sequence[DeviceBatch], *, forward_only: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and, unless told otherwise, backward of a global batch; gradients end up reduced and averaged over its
    tokens.

    Args:
        model: from :func:`wrap_for_data_parallel`.
        batches: this rank's micro-batches; every data-parallel rank has equally many.
        forward_only: compute losses only.

    Returns:
        (sum of the token losses, number of tokens) over the whole global batch: two float64 scalars on the device.
    """
    if not forward_only:
        model.zero_grad_buffer()
    # megatron's schedules leave it to the caller to keep no activations where there is no backward.
    with torch.set_grad_enabled(not forward_only):
        store = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=max(batch.tokens.shape[1] for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
    total = torch.zeros(2, dtype=torch.float64, device=batches[0].tokens.device)
    for figures in store:  # empty on stages without the loss
        total += figures
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total[0], total[1]


def _forward_step(batches: Iterator[DeviceBatch], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    gpt = unwrap_model(model)
    gpt.rotary_pos_emb.set_positions(batch.positions)
    losses = model(batch.tokens, None, batch.micro_batch, labels=batch.labels)
    return losses, partial(sum_loss, batch.loss_mask)


def sum_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum over tokens; megatron divides the gradients by the global batch's number of tokens."""
    losses = losses.flatten()
    total = losses.float().mul(loss_mask).sum() if losses.dtype != torch.float64 else losses.mul(loss_mask).sum()
    tokens = loss_mask.sum()
    # A stored clone: megatron may change the returned loss in place.
    return total, tokens.int(), torch.stack((total.detach().double(), tokens.double()))
