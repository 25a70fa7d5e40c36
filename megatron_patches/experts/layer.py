"""Megatron's router and layer with experts, for the rows of one nano-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter

from megatron_patches.experts.balance import Half, balanced, coefficient, with_loss
from megatron_patches.experts.dispatch import Dispatch
from megatron_patches.experts.exchange import Exchange
from megatron_patches.experts.grouped import computed, lie_last_first

Parts = Generator[None, None, torch.Tensor]
"""A function that pauses while rows are on their way, and returns a tensor."""


class BalancedRouter(TopKRouter):
    """Megatron's router with losses over the micro-batch. :func:`take_halves` turns built ones into it."""

    def _apply(self, function: Any, recurse: bool = True) -> BalancedRouter:
        """Keeps biases of experts and counts of rows in float32 where weights are cast: bfloat16 ends at 256 rows."""
        buffers = {name: each for name, each in self.named_buffers(recurse=False) if each.dtype == torch.float32}
        super()._apply(function, recurse)
        for name, before in buffers.items():
            now = getattr(self, name)
            if now.dtype != torch.float32:
                setattr(self, name, before.to(now.device))
        return self

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, half: Half
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, experts] probabilities of the experts that each row goes to, and which these are.

        Args:
            hidden: [rows, 1, hidden].
            half: the rows' nano-batch.
        """
        self._maintain_float32_expert_bias()
        config = self.config
        logits = self.gating(hidden).flatten(0, -2)
        graded = torch.is_grad_enabled() and half.balance.training
        if graded and config.moe_z_loss_coeff is not None:
            squares = torch.logsumexp(logits, -1).square()
            logits = with_loss(logits, config.moe_z_loss_coeff * (squares * half.real_N).sum())
        probs, chosen = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
        )
        best, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        assert self.layer_number is not None
        with torch.no_grad():
            entropy = -torch.special.xlogy(scores, scores).sum(-1)
            half.balance.count(self.layer_number, half, best, chosen, entropy)
            if graded and self.enable_expert_bias:  # recomputed parts have gradients the second time only
                self.local_tokens_per_expert += (chosen & half.real_N[:, None]).sum(0)
        if graded and (coefficient(config, "aux_loss") or coefficient(config, "seq_aux_loss")):
            probs = balanced(probs, scores, half, self.layer_number)
        return probs, chosen


class HalvesLayer(MoELayer):
    """Megatron's layer with experts; its router counts for a micro-batch's nano-batch, and rows go by
    :class:`Exchange`. :func:`take_halves` turns built ones into it."""

    def forward(self, hidden: torch.Tensor, half: Half) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """[rows, 1, hidden] the sum of the experts' outputs, with shared experts; and no bias."""
        return last_of(self.parts(hidden, half)), None

    def parts(self, hidden: torch.Tensor, half: Half) -> Parts:
        """Computes what :meth:`forward` does, in three parts; between them rows are on their way to experts, and
        back."""
        again = self.moe_layer_recompute and torch.is_grad_enabled()
        probs, dispatch = self._routed(hidden, half, again)
        exchange = Exchange(dispatch, again)
        token = exchange.launch_rows(hidden.flatten(0, -2), probs)
        shared = None if self.shared_experts is None else _perhaps_again(again, self.shared_experts, hidden)
        yield
        arrived = exchange.join_rows(token)
        compute = partial(computed, self.experts, dispatch.groups)
        token = exchange.launch_outputs(_perhaps_again(again, compute, *arrived))
        yield
        summed = exchange.join_outputs(token).view_as(hidden)
        return summed if shared is None else summed + shared

    def _routed(self, hidden: torch.Tensor, half: Half, again: bool) -> tuple[torch.Tensor, Dispatch]:
        """Probabilities, and where rows go: as before where they are routed again."""
        chosen: list[torch.Tensor] = []

        def route(hidden: torch.Tensor) -> torch.Tensor:
            probs, chosen_NE = self.router(hidden, half)
            chosen.append(chosen_NE)
            return probs

        probs = _perhaps_again(again, route, hidden)
        assert self.layer_number is not None

        def find() -> Dispatch:
            rows_G, last_first = half.balance.rows_of_peers(half), lie_last_first(self.experts)
            return Dispatch.of(chosen[0], self.router.topk, self.ep_group, rows_G, last_first)

        way = half.balance.way(self.layer_number, half, find)
        chosen.clear()
        return probs, way


def last_of(parts: Parts) -> torch.Tensor:
    """The tensor that a function in parts returns; the parts run one after the other."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found: torch.Tensor = end.value
            return found


def _perhaps_again(again: bool, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``function(*tensors)``, computed again in backward where that is asked."""
    if not again:
        return function(*tensors)
    computed_twice: torch.Tensor = tensor_parallel.checkpoint(function, False, *tensors)
    return computed_twice


def add_biases(model: torch.nn.Module) -> None:
    """Let the experts of one rank add their biases.

    Megatron adds them in place, to what autograd takes for a view there. It is no view where layers of experts leave
    their exchange to others, as these do and as they are told here to say."""
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.explicit_expert_comm = True


def take_halves(model: torch.nn.Module) -> list[int]:
    """Let the layers with experts of a built model take rows in nano-batches.

    Returns:
        Their numbers in the whole model, from 1.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) is MoELayer]
    add_biases(model)
    for layer in layers:
        layer.__class__ = HalvesLayer
        layer.router.__class__ = BalancedRouter
        for parameter in layer.experts.parameters():
            # Megatron marks them where there are several expert-parallel ranks; with tensor parallelism their
            # gradients have to be added up over those ranks too, as each has rows of its own.
            parameter.allreduce = False
            # A bias that Megatron marks for that sum as well would be counted twice, or with other experts' biases.
            parameter.sequence_parallel = False
    return [layer.layer_number for layer in layers]
