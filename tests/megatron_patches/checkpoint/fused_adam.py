"""Stands for Transformer Engine's Adam on CPUs, with the names and in the types of 2.11: steps are counted per group;
moments and main weights may be held in fewer bytes, in the way that ``get_unscaled_state`` and ``set_scaled_state``
undo and do; ``state_dict`` gives them in float32."""

from __future__ import annotations

import sys
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from megatron_patches.checkpoint.adam_state import join, split


class FusedAdam(torch.optim.Optimizer):
    """AdamW.

    Args:
        params: or parameter groups.
        exp_avg_dtype, exp_avg_sq_dtype: of the moments; float16 ones are held with a scale.
        master_weights: main weights are held beside bfloat16 parameters.
        store_param_remainders: of main weights only the 16 bits that the parameters lack.
        use_decoupled_grad: gradients are in ``decoupled_grad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable and master_weight_dtype == torch.float32
        super().__init__(
            params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def _is_remainder(self, weight: torch.Tensor, name: str) -> bool:
        return self.store_param_remainders and name == "master_param" and weight.dtype == torch.bfloat16

    def _initialize(self, weight: torch.Tensor, name: str) -> None:
        dtype = torch.int16 if self._is_remainder(weight, name) else self.name_to_dtype_map[name]
        self.state[weight][name] = torch.zeros_like(weight, dtype=dtype)
        if dtype == torch.float16:
            self._scales.setdefault(weight, {})[name] = torch.ones(())

    def initialize_state(self, weight: torch.Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq", *(["master_param"] if self.master_weights else [])):
            self._initialize(weight, name)
        if self.master_weights and not store_param_remainders:
            self.set_scaled_state(weight, "master_param", weight.detach().float())

    def get_unscaled_state(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        held = self.state[weight][name]
        if held.dtype == torch.float16:
            return held.float() * self._scales[weight][name]
        return held if held.dtype in (torch.float32, torch.int16) else held.float()

    def set_scaled_state(self, weight: torch.Tensor, name: str, values: torch.Tensor) -> None:
        assert values.dtype == (torch.int16 if self._is_remainder(weight, name) else torch.float32)
        if name not in self.state[weight]:
            self._initialize(weight, name)
        if self.state[weight][name].dtype == torch.float16:
            scale = values.abs().max().clamp(min=1e-30) / 30000
            self._scales[weight][name] = scale
            values = values / scale
        self.state[weight][name].copy_(values)

    def _weights_by_number(self, saved: dict[str, Any]) -> dict[int, torch.Tensor]:
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        weights = chain.from_iterable(group["params"] for group in self.param_groups)
        return dict(zip(numbers, weights, strict=True))

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for number, weight in self._weights_by_number(saved).items():
            if number in saved["state"]:
                held = saved["state"][number]
                saved["state"][number] = {name: self.get_unscaled_state(weight, name) for name in held}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for number, weight in self._weights_by_number(state_dict).items():
            if number in state_dict["state"]:
                self.state[weight] = {}
                for name, values in state_dict["state"][number].items():
                    self.set_scaled_state(weight, name, values if self._is_remainder(weight, name) else values.float())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                remainders = self._is_remainder(weight, "master_param")
                if not self.state[weight]:
                    self.initialize_state(weight, remainders)
                gradient = getattr(weight, "decoupled_grad", None) if self.use_decoupled_grad else weight.grad
                if gradient is None:
                    continue
                gradient, state = gradient.float(), self.state[weight]
                whole = weight.float()
                if self.master_weights:
                    held = state["master_param"]
                    whole = join(weight, held) if remainders else held
                first = self.get_unscaled_state(weight, "exp_avg").lerp(gradient, 1 - beta1)
                second = self.get_unscaled_state(weight, "exp_avg_sq").lerp(gradient.square(), 1 - beta2)
                self.set_scaled_state(weight, "exp_avg", first)
                self.set_scaled_state(weight, "exp_avg_sq", second)
                first = first / (1 - beta1 ** group["step"])
                second = second / (1 - beta2 ** group["step"])
                whole = whole * (1 - group["lr"] * group["weight_decay"])
                whole = whole - group["lr"] * first / (second.sqrt() + group["eps"])
                if remainders:
                    top, rest = split(whole)
                    weight.copy_(top)
                    self.set_scaled_state(weight, "master_param", rest)
                else:
                    weight.copy_(whole)
                    if self.master_weights:
                        self.set_scaled_state(weight, "master_param", whole)


def use_fused_adam() -> None:
    """Let Megatron-Core take it for Transformer Engine's, which nothing else of is here; once it is imported."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    from megatron_patches.te import choice
    from megatron_patches.training import optimizer as ours

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    for module in (optimizer, optimizer_config):
        module.is_te_min_version = lambda *_: True
    for module in (ours, choice):
        module.check_moments = lambda *_: None
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    sys.modules |= {name: ModuleType(name) for name in names}
    sys.modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
