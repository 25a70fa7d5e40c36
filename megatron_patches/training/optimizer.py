"""AdamW with warm-up and decay of its learning rate, by megatron's optimizer and schedule."""

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
    """The settings that the optimizer needs; distca.train.config.schema.OptimizerConfig has them."""

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
    """The optimizer, which updates the weights, and the schedule of its learning rate."""

    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler

    def step(self) -> tuple[float, float]:
        """Clips gradients, updates weights and advances the schedule; returns the gradient norm before clipping and the
        learning rate that was used."""
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        done, grad_norm, _ = self.optimizer.step()
        assert done, "without a loss scale no update is ever skipped"
        # megatron's plain (not distributed) optimizer leaves gradients where the next backward would add them again.
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
    """Builds the optimizer of a wrapped model.

    Args:
        model: from wrap_for_data_parallel.
        settings: learning rates, decays, clipping.
        steps: steps of the whole run, for the decay.
        warmup_steps: steps of the linear warm-up.
        dtype: dtype of the parameters; with bfloat16, float32 master weights are kept.
        decay_steps: steps of the decay at the end, with the schedule wsd.
        moments: type of Adam's moments. torch.bfloat16 needs Transformer Engine's Adam. For each float32 weight it
            keeps only the 16 bits that the bfloat16 weight lacks, unless some weights are FP8 numbers.

    Raises:
        SupportError: Transformer Engine's Adam is needed and not there.
    """
    check_moments(moments, next(model.parameters()).device)
    # The schedule constant never reads it, but megatron refuses one above the rate itself.
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
            group["fused"] = True  # one pass over weights, moments and gradients instead of one per operation
    schedule = OptimizerParamScheduler(
        optimizer,
        # The first step already moves: megatron's warm-up counts from step 0, where the rate would be 0.
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
        # A resumed run follows its own settings, which may have changed; the checkpoint says how many steps were done.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return OptimizerAndSchedule(optimizer, schedule)


def _fewer_bytes(model: DistributedDataParallel, moments: torch.dtype) -> dict[str, Any]:
    """Returns fields of megatron's configuration for moments that are not float32, and for FP8 weights."""
    # Megatron itself must hold the main weights of FP8 weights. With delayed scaling it would leave that to Transformer
    # Engine's Adam. This one would take the weights for bfloat16 ones and keep only 16 bits more of each.
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
    """Yields torch's Adam optimizers inside megatron's; there are none where Apex or Transformer Engine is installed,
    whose Adam it takes."""
    for adam in inner_adams(optimizer):
        if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            yield adam
