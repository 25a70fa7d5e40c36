"""Stands for Transformer Engine's Adam on CPUs: steps are counted per group, and moments and weights may be held in
fewer bytes, in the way that ``get_unscaled_state`` and ``set_scaled_state`` undo and do."""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.checkpoint.adam_state import join, split


class FusedAdam(torch.optim.Optimizer):
    """AdamW.

    Args:
        params: or parameter groups.
        moments: type of both moments; float16 ones are held with a scale.
        remainders: parameters are bfloat16, and the rest of their float32 numbers is held as int16.
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
        moments: torch.dtype = torch.float32,
        remainders: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable
        super().__init__(
            params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._moments, self._remainders = moments, remainders
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def initialize_state(self, weight: torch.Tensor) -> None:
        self._scales[weight] = {}
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[weight][name] = torch.zeros_like(weight, dtype=self._moments)
            self._scales[weight][name] = torch.ones(())
        if self._remainders:
            self.state[weight]["master_param"] = torch.zeros_like(weight, dtype=torch.int16)

    def get_unscaled_state(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        held = self.state[weight][name]
        if self._moments != torch.float16:
            return held if held.dtype == torch.float32 else held.float()
        return held.float() * self._scales[weight][name]

    def set_scaled_state(self, weight: torch.Tensor, name: str, values: torch.Tensor) -> None:
        assert values.dtype == torch.float32
        if name not in self.state[weight]:
            self.initialize_state(weight)
        if self._moments == torch.float16:
            scale = values.abs().max().clamp(min=1e-30) / 30000
            self._scales[weight][name] = scale
            values = values / scale
        self.state[weight][name].copy_(values)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if not self.state[weight]:
                    self.initialize_state(weight)
                if weight.grad is None:
                    continue
                gradient, state = weight.grad.float(), self.state[weight]
                whole = join(weight, state["master_param"]) if self._remainders else weight.float()
                first = self.get_unscaled_state(weight, "exp_avg").lerp(gradient, 1 - beta1)
                second = self.get_unscaled_state(weight, "exp_avg_sq").lerp(gradient.square(), 1 - beta2)
                self.set_scaled_state(weight, "exp_avg", first)
                self.set_scaled_state(weight, "exp_avg_sq", second)
                first = first / (1 - beta1 ** group["step"])
                second = second / (1 - beta2 ** group["step"])
                whole = whole * (1 - group["lr"] * group["weight_decay"])
                whole = whole - group["lr"] * first / (second.sqrt() + group["eps"])
                if self._remainders:
                    top, rest = split(whole)
                    weight.copy_(top)
                    state["master_param"].copy_(rest)
                else:
                    weight.copy_(whole)
