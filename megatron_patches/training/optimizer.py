"""Builds Megatron's AdamW and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_patches.checkpoint.adam_state import inner_adams
from megatron_patches.te.choice import check_moments
from megatron_patches.te.fp8_weights import has_fp8_weights


class OptimizerSettings(Protocol):
    @property
    def lr(self) -> float: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def clip_grad(self) -> float: ...
    @property
    def distributed(self) -> bool: ...
    @property
    def schedule(self) -> str: ...


@dataclass(frozen=True)
class OptimizerAndSchedule:
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler

    def step(self) -> tuple[float, float]:
        """Clips gradients, updates weights and advances the schedule.

        Returns:
            The norm of the gradients before clipping, and the learning rate of this update.
        """
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        done, grad_norm, _ = self.optimizer.step()
        assert done, "without a loss scale no update is ever skipped"
        # Without the distributed optimizer `grad` would stay set. CAD's steps drop `grad`, but a backward outside of
        # CAD's steps would add to it.
        self.optimizer.zero_grad()
        self.schedule.step(increment=1)
        return float(grad_norm), float(lr)


def build_optimizer(
    model: DistributedDataParallel,
    settings: OptimizerSettings,
    steps: int,
    warmup_steps: int,
    dtype: torch.dtype,
    decay_steps: int = 1,
    moments: torch.dtype = torch.float32,
) -> OptimizerAndSchedule:
    """Builds the optimizer and the schedule of a model.

    Args:
        model: from ``wrap_for_data_parallel``.
        steps: number of steps of the whole run; a schedule with decay decays until the last step.
        warmup_steps: number of steps, at the run's beginning, in which the learning rate rises linearly.
        dtype: dtype of the model's weights that are not in FP8.
        decay_steps: number of steps of the decay at the run's end, for the schedule "wsd" (warm-up, stable, decay).
        moments: dtype of Adam's moments, torch.float32 or torch.bfloat16. bfloat16 needs Transformer Engine's Adam.

    Raises:
        SupportError: ``moments`` needs Transformer Engine's Adam, which cannot be used here.
    """
    check_moments(moments, next(model.parameters()).device)
    # The schedule "constant" never reads min_lr, but Megatron refuses a min_lr above lr.
    min_lr = settings.lr if settings.schedule == "constant" else settings.min_lr
    config = OptimizerConfig(
        lr=settings.lr,
        min_lr=min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.distributed,
        **_fewer_bytes(model, moments),
    )
    optimizer = get_megatron_optimizer(config, [model], get_standard_config_overrides(config))
    for adam in torch_adams(optimizer):
        for group in adam.param_groups:
            group["fused"] = True
    schedule = OptimizerParamScheduler(
        optimizer,
        # Megatron's warm-up takes init_lr for the first step. A step with init_lr 0 would change nothing.
        init_lr=settings.lr / max(warmup_steps, 1),
        max_lr=settings.lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(steps, warmup_steps + 1),
        lr_decay_style="WSD" if settings.schedule == "wsd" else settings.schedule,
        wsd_decay_steps=decay_steps,
        lr_wsd_decay_style="linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        # A resumed run takes its schedule from its own settings, and the step number from the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return OptimizerAndSchedule(optimizer, schedule)


def _fewer_bytes(model: DistributedDataParallel, moments: torch.dtype) -> dict[str, Any]:
    """Returns the fields that Megatron's OptimizerConfig needs for bfloat16 moments or for FP8 weights; else none."""
    # With fp8_recipe None and bfloat16 moments the optimizer would keep only 16 bits of a weight's float32 copy: those
    # that a bfloat16 weight lacks. An FP8 weight lacks more bits, and needs the whole copy. "tensorwise" is right for
    # any scaling: the optimizer only asks whether the recipe is None, "delayed" or "mxfp8". With float32 moments the
    # recipe changes nothing.
    held = {"fp8_recipe": "tensorwise"} if has_fp8_weights(model) else {}
    if moments == torch.float32:
        return held
    gradients = torch.float32 if model.ddp_config.grad_reduce_in_fp32 else torch.bfloat16
    return held | {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": gradients,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
    }


def torch_adams(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for adam in inner_adams(optimizer):
        if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            yield adam
