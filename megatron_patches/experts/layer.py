"""Megatron's router and layer with experts, for rows that come in halves."""

from __future__ import annotations

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
from megatron_patches.experts.grouped import computed


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
            half: the rows' half.
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
    """Megatron's layer with experts; its router counts for a micro-batch's half, and rows go by :class:`Dispatch`.
    :func:`take_halves` turns built ones into it."""

    def forward(self, hidden: torch.Tensor, half: Half) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """[rows, 1, hidden] what the experts put out, shared ones too; and no bias."""
        if self.moe_layer_recompute and torch.is_grad_enabled():
            return tensor_parallel.checkpoint(lambda x: self._output(x, half), False, hidden), None
        return self._output(hidden, half), None

    def _output(self, hidden: torch.Tensor, half: Half) -> torch.Tensor:
        shared = self.shared_experts(hidden) if self.shared_experts is not None else None
        probs, chosen = self.router(hidden, half)
        dispatch = Dispatch.of(chosen, self.router.topk, self.ep_group)
        rows, row_probs = dispatch.send(hidden.flatten(0, -2), probs)
        output = computed(self.experts, rows, dispatch.groups, row_probs)
        summed = dispatch.bring_back(output).view_as(hidden)
        return summed if shared is None else summed + shared


def add_biases(model: torch.nn.Module) -> None:
    """Let the experts of one rank add their biases. Megatron does it in place, in what autograd takes for a view there
    unless layers of experts are said to leave their exchange to others, as they do."""
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.explicit_expert_comm = True


def take_halves(model: torch.nn.Module) -> list[int]:
    """Let the layers with experts of a built model take rows in halves.

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
