"""Checks and prepares a model for a step, for ``distca.CAD``, the object that a training script makes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import unwrap_model

from distca.errors import SupportError
from distca.plan import PlanOptions
from distca.runtime import AttentionPool
from megatron_patches.experts.layer import BalancedRouter
from megatron_patches.layers.block import refuse_other_schedule
from megatron_patches.patches.gpt_forward import check_attached, check_no_autocast
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
"""The planner's options that must be equal in a step's plan and in the model's CAD, with names for messages."""


def check_ready(model: Any, step: Step, pool: AttentionPool, options: PlanOptions, *, forward_only: bool) -> None:
    """Checks on this rank alone that a model can run a step.

    Args:
        model: from ``wrap_for_data_parallel``. With ``forward_only`` it may also be a model that is not wrapped.

    Raises:
        SupportError: ``step`` is no Step; torch.autocast is on; for training, torch.inference_mode is on, or torch's
            anomaly detection with its check for nan; the model was not attached, or was changed since; the step was
            planned with other options, or for more token ids than the model has; or weights would get wrong gradients
            or updates.
    """
    if not forward_only:
        if torch.is_inference_mode_enabled():
            raise SupportError("torch.inference_mode is on, in which nothing can be trained: leave it before the step.")
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            raise SupportError(
                "torch.autograd.set_detect_anomaly is on, which would find nan in dummy gradients that nobody reads: "
                "leave it out, or set its check_nan to False."
            )
        check_wrapped(model)
    gpt = unwrap_model(model)
    check_attached(gpt)
    check_as_attached(gpt, pool)
    _check_step(step, options, gpt)
    # The model's forward refuses autocast too, but only after other stages have begun to wait for this rank.
    check_no_autocast(step.batches[0].tokens.device)
    if not forward_only:
        check_trained_weights(model)


def made_ready(model: Any, step: Step, forward_step: ForwardStep, *, forward_only: bool) -> ForwardStep:
    """Prepares a checked model for a step; unless ``forward_only``, sets gradients to zero. All ranks must call this.

    Returns:
        A function that calls ``forward_step`` and checks what ``forward_step`` returns.

    Raises:
        SupportError: weights differ between data-parallel ranks.
    """
    if not forward_only:
        _check_replicas(model)
        _zero_gradients(model)
        _let_loss_scale_be_written()
    # Several models may share a configuration, so every step sets no_sync_func for the model that it runs.
    if isinstance(model, DistributedDataParallel):
        own_schedule = step.routes is not None and parallel_state.get_pipeline_model_parallel_world_size() > 1
        model.config.no_sync_func = refuse_other_schedule if own_schedule else no_sync_of(model)
    return with_counted_tokens(forward_step, trains=not forward_only)


def _let_loss_scale_be_written() -> None:
    """Removes Megatron's scale of experts' auxiliary losses if it is an inference tensor.

    Megatron makes the scale in its first step, which may be an evaluation inside of torch.inference_mode. Later steps
    write into the scale, but training cannot write into an inference tensor.
    """
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    if scale is not None and scale.is_inference():
        MoEAuxLossAutoScaler.main_loss_backward_scale = None


def _check_step(step: Step, options: PlanOptions, gpt: Any) -> None:
    if not isinstance(step, Step):
        raise SupportError(
            f"The step is a {type(step).__name__}; give a step that CAD.plan_ahead or CAD.plan_step returned."
        )
    for name, setting in _RUN_BY.items():
        if getattr(step.plan.options, name) != getattr(options, name):
            raise SupportError(
                f"The step was planned by a CAD whose `{setting}` is not that of the model's CAD: plan the step with "
                "the CAD that attached the model."
            )
    if step.vocabulary is None or step.vocabulary > known_ids(gpt):
        known = "before any model was attached" if step.vocabulary is None else f"for {step.vocabulary:,} token ids"
        raise SupportError(
            f"The step was planned {known}, and the model has {known_ids(gpt):,} token ids, for which the documents "
            "were not checked: plan the step after CAD.attach, with the CAD that attached the model."
        )


def known_ids(model: Any) -> int:
    """Returns how many token ids a model has, without padding of the embedding."""
    return int(getattr(model, "vocabulary", None) or model.vocab_size)


def _zero_gradients(model: DistributedDataParallel) -> None:
    if getattr(model, "unfinished", False):
        _forget_step(model)
    model.unfinished = True
    model.zero_grad_buffer()
    for weight in model.param_to_bucket_group:
        weight.grad = None  # backward would add to a ``grad`` that a previous optimizer left


def _forget_step(model: DistributedDataParallel) -> None:
    """Resets what an exception in the previous step left unfinished: the reduction of gradients, and counts of rows."""
    for group in model.bucket_groups + model.expert_parallel_bucket_groups:
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None
        group.per_param_grad_ready_counts = {}
    for module in model.modules():
        if isinstance(module, BalancedRouter) and module.enable_expert_bias:
            module.local_tokens_per_expert.zero_()


def note_trained(model: DistributedDataParallel) -> None:
    """Marks a training step as finished. Without the mark, :func:`made_ready` takes the step for failed."""
    model.unfinished = False
    note_gradients(model)


def _check_replicas(model: Any) -> None:
    """Refuses a model whose weights differ between data-parallel ranks.

    They differ if the model was wrapped for a distributed optimizer, but trained with another optimizer.
    """
    if model.weights_gathered:  # a distributed optimizer has run, or the model was not wrapped for one
        return
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    weights = [weight for weight in model.parameters() if not is_fp8(weight)]
    _check_alike([weight for weight in weights if getattr(weight, "allreduce", True)], dense)
    if model.config.num_moe_experts:
        experts = [weight for weight in weights if not getattr(weight, "allreduce", True)]
        _check_alike(experts, parallel_state.get_expert_data_parallel_group())


def _check_alike(weights: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    if not weights or group.size() == 1:
        return
    sums = torch.stack([weight.detach().sum(dtype=torch.float64) for weight in weights])
    most = torch.stack((sums, -sums))  # reduced by MAX: the largest sums, and the smallest sums negated
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    differ = most[0] != -most[1]
    if (differ & most.isfinite().all(0)).any():  # weights that are not finite show in the loss
        raise SupportError(
            "Weights differ between data-parallel ranks: the optimizer updates all weights, but each rank has reduced "
            "gradients of its own shard only. Set use_distributed_optimizer=True in Megatron's OptimizerConfig, or "
            "distributed_optimizer=False in CAD.data_parallel."
        )


def check_wrapped(model: Any) -> None:
    """Raises SupportError for a model that ``wrap_for_data_parallel`` did not return."""
    finalize = getattr(getattr(model, "config", None), "finalize_model_grads_func", None)
    wrapped = isinstance(model, DistributedDataParallel) and hasattr(model, "weights_gathered")
    if not wrapped or finalize is None:
        raise SupportError(
            f"The model is a {type(model).__name__} whose gradients would not be reduced and divided: train what "
            "CAD.data_parallel returns."
        )
