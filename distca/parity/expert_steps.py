"""Steps of training models with experts, clipped and updated by Adam, held against unmodified Megatron-Core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from distca.parity.cases import ParityCase, case_documents
from distca.parity.disaggregated import attached, whole_weights
from distca.parity.experts import Numbers, biases_of, move_biases, set_biases, worst
from distca.parity.unmodified import computed_once, unmodified_model, unmodified_outcome
from distca.testing.reference_attention import relative_error
from megatron_patches.training.optimizer import OptimizerAndSchedule, build_optimizer
from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

STEPS = 5
Trained = tuple[list[float], list[float], dict[str, torch.Tensor], Numbers]
"""Losses and gradient norms by step; at the end, weights by name and biases of experts by layer."""


@dataclass(frozen=True)
class Adam:
    """Rates at which a few steps change weights by some percent; gradients are clipped in every step."""

    distributed: bool
    lr: float = 1e-3
    min_lr: float = 0.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-5
    clip_grad: float = 0.1
    schedule: str = "constant"


def step_differences(
    cases: Sequence[ParityCase], device: torch.device, *, distributed: bool, steps: int = STEPS
) -> list[dict[str, float]]:
    """Losses, gradient norms, weights and biases after steps of training, relative to unmodified Megatron-Core's, which
    trains on the micro-batches into which documents were dealt.

    Args:
        cases: what to train.
        device: this rank's device.
        distributed: whether the optimizer's state is sharded over data-parallel ranks.
        steps: of the optimizer.
    """
    results = []
    for case in cases:
        whole = unmodified_model(case, torch.float32)
        weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
        found, dealt = _trained(case, device, weights, Adam(distributed), steps)
        model, optimizer = _unmodified(case, device, steps)  # which gathers what parameters all ranks have
        expected = computed_once(partial(_trained_unmodified, case, model, optimizer, device, dealt))
        results.append(_compared(found, expected))
    return results


def _compared(found: Trained, expected: Trained) -> dict[str, float]:
    off = [relative_error(weight, expected[2][name]) for name, weight in found[2].items()]
    return {
        "loss": _most(found[0], expected[0]),
        "norm": _most(found[1], expected[1]),
        "weight": max(off),
        "bias": worst(found[3], expected[3]),
    }


def _most(found: list[float], expected: list[float]) -> float:
    """How far any number is off, relative to it."""
    return max(abs(each - right) / abs(right) for each, right in zip(found, expected, strict=True))


def _trained(
    case: ParityCase, device: torch.device, weights: dict[str, torch.Tensor], adam: Adam, steps: int
) -> tuple[Trained, list[Any]]:
    """Returns the outcome of training, and each step's micro-batches."""
    cad, model = attached(case, torch.float32, device, "reference", weights)
    set_biases(model)
    ddp = cad.data_parallel(model, distributed_optimizer=adam.distributed)
    optimizer = build_optimizer(ddp, adam, steps, 1, torch.float32)
    losses, norms, dealt = [], [], []
    for _ in range(steps):
        step = cad.plan_step(case_documents(case))
        total, tokens = sum_over_ranks(cad.forward_backward(step, summed_loss_step, ddp), device)
        norm, _ = optimizer.step()
        losses.append((total / tokens).item())
        norms.append(norm)
        dealt.append(step.documents.micro_batches)
    return (losses, norms, whole_weights(case, cad, model, weights), biases_of(model)), dealt


def _unmodified(
    case: ParityCase, device: torch.device, steps: int
) -> tuple[DistributedDataParallel, OptimizerAndSchedule]:
    model = unmodified_model(case, torch.float32).to(device)
    set_biases(model)
    held = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    ddp = DistributedDataParallel(config=model.config, ddp_config=held, module=model)
    return ddp, build_optimizer(ddp, Adam(distributed=False), steps, 1, torch.float32)


def _trained_unmodified(
    case: ParityCase,
    ddp: DistributedDataParallel,
    optimizer: OptimizerAndSchedule,
    device: torch.device,
    dealt: Sequence[Any],
) -> Trained:
    model, losses, norms = ddp.module, [], []
    for micro_batches in dealt:
        ddp.zero_grad_buffer()
        outcome = unmodified_outcome(case, model, device, micro_batches)
        for name, weight in model.named_parameters():
            weight.main_grad.copy_(outcome.gradients[name])
        move_biases(model, case.config.get("moe_router_bias_update_rate", 0.0))
        norm, _ = optimizer.step()
        losses.append(outcome.loss)
        norms.append(norm)
    weights = {name: weight.detach().double().cpu() for name, weight in model.named_parameters()}
    return losses, norms, weights, biases_of(model)
