"""The candidate: training by the public API, as a script does it: CAD, its block spec and schedule, Megatron's DDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from distca.cad_options import KernelName
from distca.parity.cases import ParityCase, case_documents, config_of
from distca.parity.outcome import Outcome
from distca.plan import Direction, Layout, Plan
from distca.testing.plans import random_plan
from megatron_patches.api import CAD
from megatron_patches.model.gpt import build_gpt, build_hybrid
from megatron_patches.model.whole_parameters import (
    divisions_of,
    gather_gradients,
    gather_whole,
    load_full_weights,
    names_in_whole,
)
from megatron_patches.ranks.groups import initialize_model_parallel
from megatron_patches.steps.device_batch import Batch
from megatron_patches.te.choice import Linears
from megatron_patches.training.training_step import (
    loss_and_tokens,
    sum_over_ranks,
    summed_loss_step,
    wrap_for_data_parallel,
)

TOLERANCE = 0.1
"""How far servers may be above the mean, as a part of it. With so few tokens they can hardly be level, and planners
that try take most of a case's time."""


def run_disaggregated(
    case: ParityCase,
    dtype: torch.dtype,
    device: torch.device,
    kernel: KernelName,
    weights: dict[str, torch.Tensor],
    *,
    summed_loss: bool = True,
    linears: Linears = "auto",
    gradients: torch.dtype = torch.float32,
) -> Outcome:
    """The candidate, over all ranks, through the public API; every rank calls it and gets the same outcome.

    Args:
        case: what to compare.
        dtype: of weights and activations; gradients of float64 ones are float64.
        device: this rank's device.
        kernel: name of the core-attention kernel.
        weights: of the whole model.
        summed_loss: take the loss summed with the output layer, else Megatron's loss of every token.
        linears: see :class:`megatron_patches.api.CAD`.
        gradients: type in which they are added up.
    """
    exact = dtype == torch.float64  # in which neither Megatron's fused products nor CAD's DDP add up gradients
    cad, model = attached(case, dtype, device, kernel, weights, linears=linears, reduced=not exact)
    if exact:
        ddp = wrap_for_data_parallel(model, distributed_optimizer=False, gradients=dtype)
    else:
        ddp = cad.data_parallel(model, distributed_optimizer=False, gradients=gradients)
    step = cad.plan_step(case_documents(case))
    forward_step = summed_loss_step if summed_loss else token_losses_step
    return outcome_of(case, cad, model, cad.forward_backward(step, forward_step, ddp), weights)


def outcome_of(
    case: ParityCase, cad: CAD, model: GPTModel, reports: Sequence[torch.Tensor], weights: dict[str, torch.Tensor]
) -> Outcome:
    """Returns the outcome of a step of the case, the same on every rank; every rank calls it.

    Args:
        case: the case.
        cad: the case's.
        model: this rank's part, with the gradients of the step.
        reports: [summed loss, target tokens] of every micro-batch on the last stage.
        weights: of the whole model, for names and shapes.
    """
    total, tokens = sum_over_ranks(reports, cad.device)
    gradients = gather_gradients(model, _names(case, cad, model), weights)
    return Outcome((total / tokens).item(), gradients)


def load_weights(case: ParityCase, cad: CAD, model: GPTModel, weights: dict[str, torch.Tensor]) -> None:
    """Copy this rank's shares of the whole model's ``weights`` into its part of it."""
    own = {name: weights[whole] for name, whole in _names(case, cad, model).items()}
    load_full_weights(model, own, parallel_state.get_tensor_model_parallel_rank())


def whole_weights(
    case: ParityCase, cad: CAD, model: GPTModel, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The whole model's weights, float64 on the CPU, from this rank's part and those of others; every rank calls it.
    ``weights``: others of the whole model, for their shapes."""
    names = _names(case, cad, model)
    parts = {names[name]: weight for name, weight in model.named_parameters()}
    return gather_whole(parts, weights, divisions_of(model))


def attached(
    case: ParityCase,
    dtype: torch.dtype,
    device: torch.device,
    kernel: KernelName,
    weights: dict[str, torch.Tensor],
    *,
    disaggregate: bool = True,
    reduced: bool = True,
    linears: Linears = "auto",
    deterministic: bool = False,
    tolerance: float | None = None,
) -> tuple[CAD, GPTModel]:
    """The case's CAD and this rank's part of its model, with its shares of the weights; every rank calls it.

    Args:
        case: the case.
        dtype: of weights and activations.
        device: this rank's device.
        kernel: name of the core-attention kernel.
        weights: of the whole model.
        disaggregate: False leaves attention at home.
        reduced: whether the model will be wrapped in Megatron's DDP, which holds the gradients.
        linears, deterministic: see :class:`megatron_patches.api.CAD`.
        tolerance: the planner's; None for :data:`TOLERANCE`, or for CAD's own where there are servers without a model.
    """
    if tolerance is None and not case.servers:  # what goes to servers without a model is looked at
        tolerance = TOLERANCE
    initialize_model_parallel(case.tp, case.pp, case.seed, case.ep)
    config = config_of(case, dtype)
    tokens = max(sum(lengths) for lengths in case.micro_batches)
    cad = CAD(
        config,
        tokens_per_rank=tokens,
        disaggregate=disaggregate,
        ping_pong=case.ping_pong,
        backward="resend" if case.pp > 1 else case.backward,
        kernel=kernel,
        deal=case.deal,
        ranks_per_node=case.ranks_per_node,
        recompute="all" if case.recompute == "all" and disaggregate else "none",
        offload=case.offload and disaggregate,
        linears=linears,
        deterministic=deterministic,
        servers=case.servers if disaggregate else 0,
        speeds=case.speeds if disaggregate else (),
        model_options=case.options,
        hybrid_layer_pattern=case.pattern,
        tolerance=tolerance,
    )
    if case.scheduler == "random":
        cad.options = replace(cad.options, scheduler=partial(_random_plan, case))
    config.gradient_accumulation_fusion = reduced
    if case.pattern:
        spec = cad.hybrid_stack_spec()
        built = build_hybrid(case.shape.vocabulary, config, spec, case.pattern, rotary_percent=case.rotary_percent)
    else:
        built = build_gpt(case.model, case.shape.vocabulary, config, cad.block_spec(), case.rotary_percent)
    model = cad.attach(built).to(device=device, dtype=dtype)
    load_weights(case, cad, model, weights)
    return cad, model


def token_losses_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """The forward step with Megatron's loss of every token; reports as summed_loss_step."""
    batch = next(batches)
    losses = model(batch.tokens, batch.positions, batch.attention, labels=batch.labels)
    return losses, lambda losses: loss_and_tokens(batch.loss_mask, (losses * batch.loss_mask).sum())


def _random_plan(case: ParityCase, layout: Layout, direction: Direction) -> Plan:
    return random_plan(layout, case.seed * 1000 + layout.tokens + (50 if direction == "backward" else 0))


def _names(case: ParityCase, cad: CAD, model: GPTModel) -> dict[str, str]:
    """Names in the whole model of the parameters of this rank's part."""
    first = cad.stage * (case.shape.layers // case.pp)
    return names_in_whole(model, first, tied=case.tie_embeddings and cad.stage > 0)
