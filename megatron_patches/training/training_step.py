"""One training step of megatron-core: forward and backward over the micro-batches, with a loss that all tokens of the
global batch share in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
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
from megatron_patches.patches.gradient_norm import norm_gradients_together
from megatron_patches.steps.step import Batch
from megatron_patches.te import quantization
from megatron_patches.te.fp8_weights import broadcast_weights, has_fp8_weights

# Gradients in one bucket, which is reduced at once. It is the same for every number of ranks, so that checkpoints of
# the distributed optimizer, whose shards are parts of buckets, are cut alike.
_BUCKET_PARAMETERS = 100_000_000


def wrap_for_data_parallel(
    model: GPTModel, distributed_optimizer: bool, gradients: torch.dtype = torch.float32
) -> DistributedDataParallel:
    """Casts a model to bfloat16 where the configuration says so, and adds gradient reduction over data-parallel ranks.

    Gradients are added up and reduced in float32, or in bfloat16 where ``gradients`` says so. Without pipeline stages a
    bucket of gradients is reduced while backward goes on.

    A weight gets a gradient once per nano-batch. Megatron counts these in the first global batch, which it reduces
    after backward. From then on it starts a bucket's reduction at its last gradient. So every micro-batch must give
    every weight equally many gradients, also where this rank has no rows.
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
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp_config, module=module)
    config.finalize_model_grads_func = finalize_gradients
    config.no_sync_func = no_sync_of(wrapped)
    broadcast_weights(wrapped)
    _note_gathering(wrapped)
    return wrapped


def no_sync_of(wrapped: DistributedDataParallel) -> Callable[[], Any]:
    """Returns the model's ``no_sync`` by a weak reference, for a configuration that may live longer than the model."""
    here = weakref.ref(wrapped)

    def no_sync() -> Any:
        model = here()
        assert model is not None, "a step runs on it"
        return model.no_sync()

    return no_sync


def _note_gathering(wrapped: DistributedDataParallel) -> None:
    """Makes ``weights_gathered`` tell whether weights were gathered, as Megatron's distributed optimizer does."""

    def noting(gather: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any, **options: Any) -> None:
            wrapped.weights_gathered = True
            gather(*args, **options)

        return noted

    wrapped.weights_gathered = not wrapped.ddp_config.use_distributed_optimizer
    # Newer Megatron-Core gathers through these alone.
    for group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups:
        group.start_param_sync = noting(group.start_param_sync)


def finalize_gradients(models: list[DistributedDataParallel], tokens: torch.Tensor, **options: Any) -> None:
    """Finishes reducing a global batch's gradients and divides them by its tokens.

    megatron's own function reads the number of tokens on the host before it divides. The host would wait there until
    the GPU is done with the whole step, and only then plan the next one.

    Args:
        models: from :func:`wrap_for_data_parallel`.
        tokens: int scalar on the device, the target tokens of this rank; it is known on the last pipeline stage.
        options: further arguments of megatron's function.

    Raises:
        SupportError: weights were not used as often as in the first step.
    """
    for model in models:
        _check_uses(model)
    finalize_model_grads(models, None, **options)
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(tokens, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    quantization.end_step()
    for model in models:
        model.scale_gradients(1.0 / tokens.clamp(min=1))  # type: ignore[arg-type]


def _check_uses(model: DistributedDataParallel) -> None:
    """Refuses a step in which weights got more or fewer gradients than in the first one.

    Where gradients are reduced while backward goes on, later ones would be lost.

    Raises:
        SupportError: a weight was used more or less often.
    """
    groups = model.bucket_groups + model.expert_parallel_bucket_groups
    for group in groups if model.ddp_config.overlap_grad_reduce else ():
        found = group.per_param_grad_ready_counts
        usual = group.golden_per_param_grad_ready_counts
        if group.is_first_batch and found:
            usual = found | {weight: 1 for weight in group.params if weight not in found}
        for weight in group.params:
            if found.get(weight, 0) != usual.get(weight, 0):
                name = next(name for name, each in model.named_parameters() if each is weight)
                raise SupportError(
                    f"{name.removeprefix('module.')} got {found.get(weight, 0)} gradients in the last micro-batch of "
                    f"this step, and {usual[weight]} are due as in the first step: gradients are reduced while "
                    "backward goes on. Use all trained weights equally often in every step, or set "
                    "model.ddp_config.overlap_grad_reduce = False after CAD.data_parallel."
                )


def _overlaps_reduction() -> bool:
    """Whether gradients are reduced during backward. It is not so with pipeline stages, which would have to agree on
    their last micro-batch."""
    return parallel_state.get_pipeline_model_parallel_world_size() == 1


ForwardStep = Callable[[Iterator[Batch], Any], tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]
"""A forward step: it takes an iterator over micro-batches' rows and the model, and returns the model's output and a
loss function. That takes the output and returns the summed loss, the number of target tokens (an int scalar) and
anything to be reported."""


def with_counted_tokens(forward_step: ForwardStep) -> ForwardStep:
    """Returns the forward step with checks of its results. Without a number of tokens Megatron would divide gradients
    by micro-batches, and not over all ranks.

    Raises:
        SupportError: the step or its loss function, when it is called, returns anything else.
    """

    def checked(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        one = _OneBatch(batches)
        returned = forward_step(one, model)
        if not one.taken:
            raise SupportError("The forward step took no batch: take one with next(batches), every time it is called.")
        pair = isinstance(returned, tuple | list) and len(returned) == 2
        if not pair or (not callable(returned[1]) and parallel_state.is_pipeline_last_stage()):
            raise SupportError("The forward step has to return the model's output and a function of it: the loss.")
        output, loss_function = returned
        return output, partial(_counted, loss_function)

    return checked


class _OneBatch(Iterator[Batch]):
    """The batches of a forward step: the one of its micro-batch. It refuses a second one, which would be that of
    another micro-batch."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches, self.taken = batches, False

    def __next__(self) -> Batch:
        if self.taken:
            raise SupportError("The forward step took two batches: call next(batches) once, for one micro-batch.")
        self.taken = True
        return next(self._batches)


def _counted(loss_function: Callable[[torch.Tensor], Any], output: torch.Tensor) -> Any:
    returned = loss_function(output)
    if not (isinstance(returned, tuple | list) and len(returned) == 3):
        given = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
        raise SupportError(
            f"The loss function returned {given}; it has to return three: the summed loss, the number of target "
            "tokens, by which gradients are divided, and anything to report."
        )
    total, tokens, report = returned
    if not (isinstance(total, torch.Tensor) and total.numel() == 1):
        raise SupportError("The loss function's first value is no single number; sum the losses of its tokens.")
    if not isinstance(tokens, torch.Tensor) or tokens.numel() != 1 or _is_no_count(tokens):
        raise SupportError(
            "The loss function's second value is no integer tensor; return how many target tokens there are, as "
            "(loss_mask > 0).sum().int()."
        )
    # Results must be no views, as Megatron's 1F1B frees what a stage returned.
    return total.sum() if total.ndim else total, tokens.sum() if tokens.ndim else tokens, report


def _is_no_count(tokens: torch.Tensor) -> bool:
    return tokens.is_floating_point() or tokens.dtype == torch.bool


def run_schedule(
    model: DistributedDataParallel, batches: Sequence[Batch], forward_step: ForwardStep, *, forward_only: bool = False
) -> list[Any]:
    """Runs forward and, unless told otherwise, backward of a global batch by Megatron's own schedule. Gradients end up
    reduced and averaged over its tokens.

    Args:
        model: from :func:`wrap_for_data_parallel`.
        batches: this rank's micro-batches; every data-parallel rank has equally many.
        forward_step: as Megatron's schedules take it.
        forward_only: compute losses only.

    Returns:
        The reports of the loss function, by micro-batch; empty on stages without the loss.
    """
    # Megatron's schedules do not switch gradients off where there is no backward; activations would be kept.
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
    """The forward step of language models with the fused loss, which reports [summed loss, target tokens] in
    float64."""
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
    """The forward step that reports the log-probability of every row's label, [1, rows]; it is for forward alone."""
    batch = next(batches)
    output = model(batch.tokens, batch.positions, batch.attention, labels=batch.labels, log_probabilities=True)
    return output, lambda values: (values.sum(), batch.loss_mask.sum().int(), values.detach().clone())


def loss_and_tokens(loss_mask: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the results of a micro-batch for Megatron's schedules: summed loss, number of tokens, and both as a
    report.

    The gradients of the global batch are divided by its number of tokens at its end.

    Args:
        loss_mask: [1, rows] bool, or weights, of which those above 0 count as tokens.
        total: the last stage's output, the sum of the losses.
    """
    tokens = (loss_mask > 0).sum()
    # The report is a copy, as Megatron may change the returned loss in place.
    return total, tokens.int(), torch.stack((total.detach().double(), tokens.double()))


def sum_over_ranks(reports: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of token losses and the number of tokens of the whole global batch, two float64 scalars.

    They are added up from the ``reports`` of :func:`summed_loss_step`, on the device. All ranks call it together."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for report in reports:  # empty on stages without the loss
        total += report
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total[0], total[1]
