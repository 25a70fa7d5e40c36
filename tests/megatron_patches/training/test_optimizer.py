"""AdamW, clipping and schedule against float64 arithmetic by hand, and what a resumed run takes from its checkpoint."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.testing.ranks import run_ranks
from distca.train.config.schema import OptimizerConfig

STEPS, WARMUP = 6, 2
FIRST = OptimizerConfig(lr=0.01, min_lr=0.002, weight_decay=0.3, beta1=0.8, beta2=0.97, epsilon=1e-3, clip_grad=1.0)
SAVED_AFTER = 4
# What a resumed run may change, all of it.
RESUMED_STEPS, RESUMED_WARMUP = 9, 1
RESUMED = OptimizerConfig(lr=0.02, min_lr=0.001, weight_decay=0.1, beta1=0.7, beta2=0.9, epsilon=1e-2, clip_grad=0.5)
# Norms of about 0.4 and 4: some steps are clipped, others not.
GRADIENT_SCALES = (0.003, 0.03, 0.003, 0.03, 0.003, 0.03)


def _gradient(step: int, number: int, shape: torch.Size) -> torch.Tensor:
    """Of parameter ``number`` in a step."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return GRADIENT_SCALES[step] * torch.randn(shape, generator=generator)


def _optimizer(seed: int, settings: OptimizerConfig, steps: int, warmup: int) -> tuple[Any, Any]:
    from distca.parity import unmodified
    from distca.parity.cases import ParityCase
    from megatron_patches.training.optimizer import build_optimizer
    from megatron_patches.training.training_step import wrap_for_data_parallel

    gpt = unmodified.unmodified_model(ParityCase(micro_batches=((5,),), seed=seed), torch.float32)
    model = wrap_for_data_parallel(gpt, settings.distributed)
    return model, build_optimizer(model, settings, steps, warmup, torch.float32)


def _step(model: Any, optimizer: Any, step: int) -> tuple[float, float, list[torch.Tensor]]:
    """(norm, learning rate, weights after it) of a step with known gradients."""
    model.zero_grad_buffer()
    weights = list(model.module.parameters())
    for number, weight in enumerate(weights):
        weight.main_grad.copy_(_gradient(step, number, weight.shape))
    norm, lr = optimizer.step()
    assert all(weight.grad is None for weight in weights), "the next backward would add to it"
    return norm, lr, [weight.detach().clone() for weight in weights]


def _train(folder: Path, distributed: bool) -> tuple[list[torch.Tensor], list[Any], list[Any], dict[str, Any]]:
    """Weights before, steps of a whole run, steps of one that resumes it with other settings, what came back beside."""
    import torch.distributed as dist

    from megatron_patches.checkpoint.save_load import load_checkpoint, save_checkpoint

    first, resumed = (replace(settings, distributed=distributed) for settings in (FIRST, RESUMED))
    model, optimizer = _optimizer(1, first, STEPS, WARMUP)
    before = [weight.detach().clone() for weight in model.module.parameters()]
    whole = []
    for step in range(STEPS):
        if step == SAVED_AFTER:
            if dist.get_rank() == 0:
                folder.mkdir()
            dist.barrier()
            save_checkpoint(folder, model, optimizer, {"step": step, "beside": [3]})
        whole.append(_step(model, optimizer, step))
    model, optimizer = _optimizer(2, resumed, RESUMED_STEPS, RESUMED_WARMUP)
    extra = load_checkpoint(folder, model, optimizer)
    return before, whole, [_step(model, optimizer, step) for step in range(SAVED_AFTER, STEPS)], extra


def _train_both(folder: Path) -> list[Any]:
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    return [_train(folder / str(distributed), distributed) for distributed in (True, False)]


class _ByHand:
    """The same in float64, as its papers have it."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = [weight.double() for weight in weights]
        self._first, self._second = ([torch.zeros_like(weight) for weight in self.weights] for _ in range(2))

    def step(self, step: int, settings: OptimizerConfig, steps: int, warmup: int) -> tuple[float, float]:
        gradients = [_gradient(step, number, weight.shape).double() for number, weight in enumerate(self.weights)]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        lr = _learning_rate(step, settings, steps, warmup)
        for number, gradient in enumerate(gradients):
            gradient *= min(settings.clip_grad / norm, 1)
            self._first[number].lerp_(gradient, 1 - settings.beta1)
            self._second[number].lerp_(gradient.square(), 1 - settings.beta2)
            first = self._first[number] / (1 - settings.beta1 ** (step + 1))
            second = self._second[number] / (1 - settings.beta2 ** (step + 1))
            if gradient.ndim > 1:  # the weights of norms do not decay
                self.weights[number] *= 1 - lr * settings.weight_decay
            self.weights[number] -= lr * first / (second.sqrt() + settings.epsilon)
        return norm, lr


def _learning_rate(step: int, settings: OptimizerConfig, steps: int, warmup: int) -> float:
    if step <= warmup:
        return settings.lr / warmup * (1 + (warmup - 1) * step / warmup)
    share = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * share


def test_steps_and_resumed_steps_are_those_by_hand(tmp_path: Path) -> None:
    for rank in run_ranks(2, _train_both, tmp_path):
        for before, whole, resumed, extra in rank:
            assert extra == {"step": SAVED_AFTER, "beside": [3]}
            by_hand, changed = _ByHand(before), _ByHand(before)
            for step in range(STEPS):
                _check(whole[step], before, by_hand, by_hand.step(step, FIRST, STEPS, WARMUP))
                if step < SAVED_AFTER:
                    changed.step(step, FIRST, STEPS, WARMUP)
                else:
                    figures = changed.step(step, RESUMED, RESUMED_STEPS, RESUMED_WARMUP)
                    _check(resumed[step - SAVED_AFTER], before, changed, figures)


def _check(found: Any, before: list[torch.Tensor], by_hand: _ByHand, figures: tuple[float, float]) -> None:
    norm, lr, weights = found
    assert (norm, lr) == (pytest.approx(figures[0], rel=1e-6), pytest.approx(figures[1], rel=1e-12))
    for start, ours, theirs in zip(before, weights, by_hand.weights, strict=True):
        # Of the way from the start, to which float32 weights of about 1 add their own rounding.
        assert float((ours - theirs).norm() / (theirs - start).norm()) < 1e-5


def _constant() -> list[float]:
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    model, optimizer = _optimizer(1, replace(FIRST, schedule="constant", lr=1e-3, min_lr=2e-3), STEPS, WARMUP)
    return [_step(model, optimizer, step)[1] for step in range(STEPS)]


def test_a_constant_rate_needs_no_lower_one() -> None:
    (rates,) = run_ranks(1, _constant)
    assert rates == pytest.approx([5e-4, 7.5e-4] + [1e-3] * 4)
