"""Wraps a model for data parallelism, and computes a step's gradients with Megatron's own schedules.

Models whose pipeline stages compute attention for each other run in ``pipeline_schedule.py`` instead.
Losses are summed over tokens, so gradients are sums too. At the step's end gradients are divided by the number of
*target tokens* in the global batch: the tokens whose loss counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
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

from distca.errors import SupportError
from distca.ops.scaling import scaled
from megatron_patches.patches.gradient_norm import norm_gradients_together
from megatron_patches.patches.weight_copies import copy_weights_together
from megatron_patches.steps.device_batch import Batch
from megatron_patches.te import quantization
from megatron_patches.te.fp8_weights import broadcast_weights, has_fp8_weights

_BUCKET_PARAMETERS = 100_000_000
"""About how many elements of gradients are reduced together, as a *bucket*. Megatron's default grows with the number of
ranks. With pipeline stages, Megatron ignores this number and reduces all gradients together."""


def wrap_for_data_parallel(
    model: GPTModel, distributed_optimizer: bool, gradients: torch.dtype = torch.float32
) -> DistributedDataParallel:
    """Wraps a model in Megatron's DistributedDataParallel, which reduces gradients over data-parallel ranks.

    Without pipeline stages, later steps than the first reduce gradients during backward of the last micro-batch.
    Megatron reduces a bucket once each of its weights got as many gradients as in the first step. So each weight must
    get the same number of gradients in every step, also on a rank without tokens.

    Args:
        model: the model, which is cast to bfloat16 if its configuration has ``bf16``.
        gradients: the dtype in which gradients are added up and reduced: torch.float32, or the weights' dtype.
    """
    config = model.config
    module = Float16Module(config, model) if config.bf16 else model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=gradients == torch.float32,
        overlap_grad_reduce=_overlaps_reduction(),
        bucket_size=_BUCKET_PARAMETERS,
        use_distributed_optimizer=distributed_optimizer,
        check_for_nan_in_grad=False,
        fp8_param_gather=has_fp8_weights(model),
    )
    norm_gradients_together()
    copy_weights_together()
    with torch.enable_grad():  # Megatron needs nodes of autograd here, also if the caller has switched it off
        wrapped = DistributedDataParallel(config=config, ddp_config=ddp_config, module=module)
    config.finalize_model_grads_func = finalize_gradients
    config.no_sync_func = no_sync_of(wrapped)
    broadcast_weights(wrapped)
    _note_gathering(wrapped)
    return wrapped


def no_sync_of(wrapped: DistributedDataParallel) -> Callable[[], Any]:
    here = weakref.ref(wrapped)  # the configuration holds the function, and may outlive the model

    def no_sync() -> Any:
        model = here()
        # After the model is gone, a model of the same configuration that is not wrapped may still run forward.
        return nullcontext() if model is None else model.no_sync()

    return no_sync


def _note_gathering(wrapped: DistributedDataParallel) -> None:
    """Adds the attribute ``weights_gathered`` to the model.

    With a distributed optimizer the attribute is False until ranks first gather the weights. Without one it is True."""

    def noting(gather: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any, **options: Any) -> None:
            wrapped.weights_gathered = True
            gather(*args, **options)

        return noted

    wrapped.weights_gathered = not wrapped.ddp_config.use_distributed_optimizer
    # Newer versions of Megatron-Core call start_param_sync of bucket groups, not of the model.
    for group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups:
        group.start_param_sync = noting(group.start_param_sync)


def finalize_gradients(models: list[DistributedDataParallel], tokens: torch.Tensor, **options: Any) -> None:
    """Finishes the reduction of gradients, and divides them by the number of target tokens of the global batch.

    It also moves delayed scaling of FP8 on to the next scales.

    Schedules call this function in place of ``finalize_model_grads``, in which the host would wait for ``tokens`` with
    Megatron-Core 0.16.1.

    Args:
        models: from :func:`wrap_for_data_parallel`.
        tokens: int scalar on the device, the number of target tokens of this rank. Only the last stage's number is
            read. Afterwards the tensor has the number of the global batch on all ranks.

    Raises:
        SupportError: in the last micro-batch a weight got more or fewer gradients than :func:`_check_uses` allows.
    """
    for model in models:
        _check_uses(model)
    finalize_model_grads(models, None, **options)
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(tokens, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    quantization.end_step()
    factor = 1.0 / tokens.clamp(min=1).float()  # torch would divide in its default dtype, perhaps bfloat16
    for model in models:
        for gradients in _reduced_gradients(model):
            scaled(gradients, factor, out=gradients)


def _reduced_gradients(model: DistributedDataParallel) -> list[torch.Tensor]:
    """Returns the memory of the gradients that this rank's optimizer reads; with the distributed optimizer, a share.

    The optimizer does not use other ranks' shares. To scale these too takes 2 ms for a billion weights."""
    groups = model.bucket_groups + model.expert_parallel_bucket_groups
    if not model.ddp_config.use_distributed_optimizer:
        return [bucket.grad_data for group in groups for bucket in group.buckets]
    return [
        bucket.grad_data.view(group.intra_distributed_optimizer_instance_size, -1)[
            group.intra_distributed_optimizer_instance_rank
        ]
        for group in groups
        for bucket in group.buckets
    ]


def _check_uses(model: DistributedDataParallel) -> None:
    """Refuses a step whose last micro-batch gave a weight more or fewer gradients than in the first step.

    A gradient that comes after its bucket was reduced would be lost. The first step itself is refused if some weights
    of a bucket group got gradients and others did not.
    """
    groups = model.bucket_groups + model.expert_parallel_bucket_groups
    for group in groups if model.ddp_config.overlap_grad_reduce else ():
        found = group.per_param_grad_ready_counts
        usual = group.golden_per_param_grad_ready_counts
        due = "are due as in the first step"
        if group.is_first_batch and found:
            usual = found | {weight: 1 for weight in group.params if weight not in found}
            due = "or more are needed in the first step"
        for weight in group.params:
            if found.get(weight, 0) != usual.get(weight, 0):
                name = next(name for name, each in model.named_parameters() if each is weight)
                raise SupportError(
                    f"{name.removeprefix('module.')} got {found.get(weight, 0)} gradients in the last micro-batch of "
                    f"this step, and {usual[weight]} {due}: gradients are reduced while backward goes on. Use all "
                    "trained weights equally often in every step, or set "
                    "model.ddp_config.overlap_grad_reduce = False after distca.CAD.data_parallel."
                )


def _overlaps_reduction() -> bool:
    return parallel_state.get_pipeline_model_parallel_world_size() == 1


ForwardStep = Callable[[Iterator[Batch], Any], tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]
"""Runs the model on one micro-batch, for Megatron's schedules.

It gets an iterator over batches, and the model. It returns the model's output and a loss function. The loss function
gets the output, and returns three values: the summed loss, the number of target tokens as an int tensor, and a report
of any type.
"""


def with_counted_tokens(forward_step: ForwardStep, *, trains: bool) -> ForwardStep:
    """Returns a function that calls ``forward_step`` and checks what ``forward_step`` returns.

    Megatron would also accept a loss without a number of tokens, and divide gradients by the number of micro-batches.

    Args:
        trains: whether backward follows. Then each loss must need a gradient. Otherwise Megatron would silently leave
            out this rank's backward, and other ranks would wait for this rank's part in attention's backward.

    Raises:
        SupportError: from the returned function, if ``forward_step`` does not take one batch, or does not return what
            :data:`ForwardStep` says; from the loss function that it returns, if that does not return what
            :data:`ForwardStep` says, or if backward follows a loss without a gradient.
    """

    def checked(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        one = _OneBatch(batches)
        returned = forward_step(one, model)
        if not one.taken:
            raise SupportError("The forward step took no batch: take one with next(batches), every time it is called.")
        pair = isinstance(returned, tuple | list) and len(returned) == 2
        if not pair or (not callable(returned[1]) and parallel_state.is_pipeline_last_stage()):
            raise SupportError("The forward step has to return the model's output and a loss function of it.")
        output, loss_function = returned
        return output, partial(_counted, loss_function, trains)

    return checked


class _OneBatch(Iterator[Batch]):
    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches, self.taken = batches, False

    def __next__(self) -> Batch:
        if self.taken:
            raise SupportError("The forward step took two batches: call next(batches) once, for one micro-batch.")
        self.taken = True
        return next(self._batches)


def _counted(loss_function: Callable[[torch.Tensor], Any], trains: bool, output: torch.Tensor) -> Any:
    returned = loss_function(output)
    if not (isinstance(returned, tuple | list) and len(returned) == 3):
        given = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
        raise SupportError(
            f"The loss function returned {given}; it has to return three: the summed loss, the number of target "
            "tokens, by which gradients are divided, and anything to report."
        )
    total, tokens, report = returned
    if not (isinstance(total, torch.Tensor) and total.numel() == 1):
        raise SupportError("The loss function's first value is no single number; return the sum of all tokens' losses.")
    if trains and not total.requires_grad:
        raise SupportError(
            "The loss function's first value needs no gradient, so this rank would leave out backward, and other ranks "
            "would wait for this rank: compute the value from the model's output, also where no token is a target."
        )
    if not isinstance(tokens, torch.Tensor) or tokens.numel() != 1 or _is_no_count(tokens):
        raise SupportError(
            "The loss function's second value is no integer tensor with one element; return the number of target "
            "tokens, for example (loss_mask > 0).sum().int()."
        )
    # Megatron's 1F1B frees the memory of the tensor that a stage returns, and refuses views, so ``total`` must not be
    # reshaped.
    return total.sum() if total.ndim else total, tokens.sum() if tokens.ndim else tokens, report


def _is_no_count(tokens: torch.Tensor) -> bool:
    return tokens.is_floating_point() or tokens.dtype == torch.bool


def run_schedule(
    model: DistributedDataParallel, batches: Sequence[Batch], forward_step: ForwardStep, *, forward_only: bool = False
) -> list[Any]:
    """Runs forward and backward of a global batch by Megatron's own schedule.

    Args:
        model: from :func:`wrap_for_data_parallel`; with ``forward_only`` it may also be the bare model.
        batches: this rank's micro-batches; their number is the same on all data-parallel ranks.
        forward_step: from :func:`with_counted_tokens`.

    Returns:
        The loss function's reports, by micro-batch; empty on pipeline stages without the loss.
    """
    # Megatron's schedules do not disable gradients for forward_only, so activations would be kept.
    with torch.set_grad_enabled(not forward_only):
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=max(batch.tokens.shape[1] for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return reports


def summed_loss_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """A :data:`ForwardStep` for training and validation.

    Its report is [2] float64: summed loss and number of target tokens."""
    batch = next(batches)
    loss = model(
        batch.tokens,
        batch.positions,
        batch.attention,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        summed_loss=True,
    )
    return loss, partial(loss_and_tokens, batch.loss_mask)


def log_probabilities_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """A :data:`ForwardStep` for forward only. Its report is [1, rows]: the log-probability of each token's label."""
    batch = next(batches)
    output = model(batch.tokens, batch.positions, batch.attention, labels=batch.labels, log_probabilities=True)
    return output, lambda values: (values.sum(), batch.loss_mask.sum().int(), values.detach().clone())


def loss_and_tokens(loss_mask: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A loss function for Megatron's schedules.

    Args:
        loss_mask: [1, rows] bool, or float32 weights. Tokens with a value above 0 are target tokens.
        total: the summed loss.

    Returns:
        The summed loss, the int number of target tokens, and a report: [2] float64 with both.
    """
    tokens = (loss_mask > 0).sum()
    # Megatron may change the returned loss in place, so the report has a copy.
    return total, tokens.int(), torch.stack((total.detach().double(), tokens.double()))


def sum_over_ranks(reports: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the summed loss and the number of target tokens of the global batch, float64 scalars on the device.

    All ranks must call this together. ``reports`` are this rank's reports of :func:`summed_loss_step`.
    """
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for report in reports:
        total += report
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total[0], total[1]
