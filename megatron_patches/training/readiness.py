"""Prepares a model for a step: checks that they go together, and sets gradients to zero.

``CAD.forward_backward`` calls :func:`made_ready` before every step and :func:`note_trained` after it. An exception may
end a step between the two. The next step then finds Megatron's gradient reduction half done, and resets it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from distca.errors import SupportError
from distca.plan import PlanOptions
from distca.runtime import AttentionPool
from megatron_patches.layers.block import refuse_other_schedule
from megatron_patches.patches.gpt_forward import check_attached
from megatron_patches.steps.step import Step
from megatron_patches.support.attached import check_as_attached
from megatron_patches.support.trained_weights import check_trained_weights
from megatron_patches.te.fp8_weights import is_fp8
from megatron_patches.training.training_step import ForwardStep, no_sync_of, with_counted_tokens
from megatron_patches.training.unread_gradients import note_gradients

_RUN_BY = {
    "disaggregate": "disaggregate",
    "resend": "backward",
    "nano_batches": "ping_pong",
    "ranks": "number of data-parallel ranks",
    "stages": "number of pipeline stages",
    "shares": "sequence parallelism",
    "kinds": "configuration's windows, sinks or softmax_scale",
    "layer_kinds": "configuration's windows",
    "align": "sequence parallelism or FP8",
}
"""The planner's options that must be the same for a step and for the model that runs it, with the user's words for
each. They say how rows are laid out, and when each rank sends which rows."""


def made_ready(
    model: Any,
    step: Step,
    forward_step: ForwardStep,
    pool: AttentionPool,
    options: PlanOptions,
    *,
    forward_only: bool,
) -> ForwardStep:
    """Checks a model and a step, and sets the model's gradients to zero; all ranks call it together.

    Args:
        model: from ``wrap_for_data_parallel``. With ``forward_only`` it may also be a model that is not wrapped.
        step: the step that is going to run.
        forward_step: runs the model on one micro-batch, as Megatron's schedules take it.
        pool: this CAD's kernel and transport; the model must have been attached by the same CAD.
        options: this CAD's options of the planner.
        forward_only: True if no gradients are computed.

    Returns:
        ``forward_step`` with checks of the values that it returns.

    Raises:
        SupportError: model and step do not go together, or the model cannot be trained as it is.
    """
    if not forward_only:
        check_wrapped(model)
    gpt = unwrap_model(model)
    check_attached(gpt)
    check_as_attached(gpt, pool)
    _check_step(step, options, gpt)
    if not forward_only:
        check_trained_weights(model)
        _check_replicas(model)
        _zero_gradients(model)
    # The function is set before every step, as another model may share the configuration and have set its own.
    if isinstance(model, DistributedDataParallel):
        in_ticks = step.routes is not None and parallel_state.get_pipeline_model_parallel_world_size() > 1
        model.config.no_sync_func = refuse_other_schedule if in_ticks else no_sync_of(model)
    return with_counted_tokens(forward_step)


def _check_step(step: Step, options: PlanOptions, gpt: Any) -> None:
    """Refuses a step that another CAD planned in another way, or whose token ids were not checked for this model."""
    for name, setting in _RUN_BY.items():
        if getattr(step.plan.options, name) != getattr(options, name):
            raise SupportError(
                f"The step was planned by a CAD whose `{setting}` is not that of the model's: plan it with the CAD "
                "that attached the model."
            )
    if step.vocabulary is None or step.vocabulary > known_ids(gpt):
        known = "before any model was attached" if step.vocabulary is None else f"for {step.vocabulary:,} token ids"
        raise SupportError(
            f"The step was planned {known}, and the model has {known_ids(gpt):,}, for which its documents were not "
            "checked: plan it after CAD.attach, with the CAD that attached the model."
        )


def known_ids(model: Any) -> int:
    """Returns how many token ids a model has, without rows that only pad its embedding."""
    return int(getattr(model, "vocabulary", None) or model.vocab_size)


def _zero_gradients(model: DistributedDataParallel) -> None:
    """Sets all gradients to zero; ``unfinished`` is then True until the step's end."""
    if getattr(model, "unfinished", False):
        _forget_step(model)
    model.unfinished = True
    model.zero_grad_buffer()
    for weight in model.param_to_bucket_group:
        weight.grad = None  # Megatron's optimizer that is not distributed leaves it set; backward would add to it


def _forget_step(model: DistributedDataParallel) -> None:
    """Resets Megatron's counts of gradients and ends reductions that it began, after a step that did not finish."""
    for group in model.bucket_groups + model.expert_parallel_bucket_groups:
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None
        group.per_param_grad_ready_counts = {}


def note_trained(model: DistributedDataParallel) -> None:
    """Notes that forward and backward of a step are done."""
    model.unfinished = False
    note_gradients(model)


def _check_replicas(model: Any) -> None:
    """Refuses a model whose weights have come to differ between data-parallel ranks.

    For a distributed optimizer each rank reduces the gradients of its shard only. The optimizer then updates this shard
    and gathers all shards. Any other optimizer updates all weights on each rank, most of them by unreduced gradients.

    Raises:
        SupportError: weights differ between data-parallel ranks; all of these ranks raise it.
    """
    # Once weights were gathered, the optimizer is known to be a distributed one.
    if getattr(model, "weights_gathered", True):
        return
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    weights = [weight for weight in model.parameters() if not is_fp8(weight)]
    _check_alike([weight for weight in weights if getattr(weight, "allreduce", True)], dense)
    if model.config.num_moe_experts:
        experts = [weight for weight in weights if not getattr(weight, "allreduce", True)]
        _check_alike(experts, parallel_state.get_expert_data_parallel_group())


def _check_alike(weights: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Refuses weights whose sums differ between ranks of a group."""
    if not weights or group.size() == 1:
        return
    sums = torch.stack([weight.detach().sum(dtype=torch.float64) for weight in weights])
    most = torch.stack((sums, -sums))  # one reduction finds each sum's maximum, and minus its minimum
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    differ = most[0] != -most[1]
    if (differ & most.isfinite().all(0)).any():  # weights that are not finite show in the loss
        raise SupportError(
            "Weights differ between data-parallel ranks: the optimizer updates all of them, but each rank has reduced "
            "gradients of its shard alone. Set use_distributed_optimizer=True in Megatron's OptimizerConfig, or "
            "distributed_optimizer=False in CAD.data_parallel."
        )


def check_wrapped(model: Any) -> None:
    """Refuses a model that ``wrap_for_data_parallel`` did not return: its gradients would not be reduced.

    Raises:
        SupportError: the model is another one; the message names its class.
    """
    finalize = getattr(getattr(model, "config", None), "finalize_model_grads_func", None)
    if not isinstance(model, DistributedDataParallel) or finalize is None:
        raise SupportError(
            f"The model is a {type(model).__name__} whose gradients would not be reduced and divided: train what "
            "CAD.data_parallel returns."
        )
