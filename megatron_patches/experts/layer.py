"""Megatron's router and layer with experts, changed to take the rows of one nano-batch at a time.

A micro-batch may be split into two *nano-batches*: one is computed while rows of the other travel between ranks. The
changed router counts each expert's rows over both, for load-balancing losses (``balance.py``). The changed layer sends
rows to expert-parallel ranks (``exchange.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter

from distca.ops.router_linear import is_faster, router_linear
from megatron_patches.experts.balance import NanoBatch, balanced, coefficient, with_loss
from megatron_patches.experts.dispatch import Dispatch
from megatron_patches.experts.exchange import Exchange
from megatron_patches.experts.grouped import FoundExperts, computed
from megatron_patches.layers.full_recompute import differentiable

Parts = Generator[None, None, torch.Tensor]
"""A generator that returns a tensor. It yields twice: while rows travel to experts, and while outputs travel back."""


class BalancedRouter(TopKRouter):
    """Megatron's router for the rows of a nano-batch, with load-balancing losses over the whole micro-batch."""

    def _apply(self, function: Any, recurse: bool = True) -> BalancedRouter:
        """Casts or moves the module, but keeps float32 buffers in float32.

        Some buffers count rows, and bfloat16 has no number between 256 and 258."""
        buffers = {name: each for name, each in self.named_buffers(recurse=False) if each.dtype == torch.float32}
        super()._apply(function, recurse)
        for name, before in buffers.items():
            now = getattr(self, name)
            if now.dtype != torch.float32:
                setattr(self, name, before.to(now.device))
        return self

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, nano_batch: NanoBatch
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
        """Chooses the experts of each row of ``hidden``, [rows, 1, hidden].

        Returns:
            [rows, experts] probabilities, 0 for experts that were not chosen; [rows, experts] bool, true for chosen
            experts; and a function that counts the rows of each expert. Callers launch transfers first, as those do
            not wait for counts.
        """
        self._maintain_float32_expert_bias()
        config = self.config
        logits = self.gating(hidden).flatten(0, -2)
        graded = torch.is_grad_enabled() and nano_batch.balance.training
        if graded and config.moe_z_loss_coeff is not None:
            squares = torch.logsumexp(logits, -1).square()
            weight = config.moe_z_loss_coeff * nano_batch.balance.loss_scale
            logits = with_loss(logits, weight * (squares * nano_batch.real_N).sum())
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
        best, scores = self._scored(logits, chosen)
        assert self.layer_number is not None
        count = partial(nano_batch.balance.count, self.layer_number, nano_batch, best, chosen, scores.detach())
        # With recomputation the router runs twice. ``graded`` is False in the first run, so rows are added once.
        if graded and self.enable_expert_bias:
            self.local_tokens_per_expert += (chosen & nano_batch.real_N[:, None]).sum(0)
        if graded and (coefficient(config, "aux_loss") or coefficient(config, "seq_aux_loss")):
            probs = balanced(probs, scores, nano_batch, self.layer_number)
        return probs, chosen, count

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Returns [..., experts] logits of ``input``, [..., hidden]."""
        plain = self.bias is None and self.config.moe_router_dtype == "fp32"
        if plain and is_faster(input, self.weight):
            return router_linear(input.flatten(0, -2), self.weight).unflatten(0, input.shape[:-1])
        logits: torch.Tensor = super().gating(input)
        return logits

    def _scored(self, logits: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [rows, experts] bool, true for each row's experts with the highest scores; and the scores."""
        by_score_alone = self.expert_bias is None and not self.config.moe_router_group_topk
        if by_score_alone and self.score_function == "softmax":
            return chosen, torch.softmax(logits, -1, dtype=torch.float32)
        best, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        return best, scores


class NanoBatchExperts(MoELayer):
    """Megatron's layer with experts for the rows of a nano-batch.

    Attributes:
        is_trained: whether any expert-parallel rank trains a weight of its part of this layer.
    """

    is_trained = True

    def forward(self, hidden: torch.Tensor, nano_batch: NanoBatch) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Returns [rows, 1, hidden] the sum of the outputs of each row's experts and the shared expert; and None."""
        return last_of(self.parts(hidden, nano_batch)), None

    def parts(self, hidden: torch.Tensor, nano_batch: NanoBatch) -> Parts:
        """:meth:`forward` as a generator that returns the sum alone."""
        again = self.moe_layer_recompute and torch.is_grad_enabled()
        # In backward ranks exchange gradients. So if any rank trains experts, backward must run on all ranks. For this
        # ``hidden`` must require a gradient.
        if torch.is_grad_enabled() and self.is_trained and (again or self.ep_group.size() > 1):
            hidden = differentiable(hidden)
        probs, dispatch, count = self._routed(hidden, nano_batch, again)
        exchange = Exchange(dispatch, again)
        launched = exchange.launch_rows(hidden.flatten(0, -2), probs)
        count()
        del count  # frees tensors
        shared = None if self.shared_experts is None else _perhaps_again(again, self.shared_experts, hidden)
        assert self.layer_number is not None
        # Finding the experts takes the host long, so it does this while rows travel.
        experts = nano_batch.balance.experts(self.layer_number, partial(FoundExperts.of, self.experts))
        yield
        arrived = exchange.join_rows(launched, experts.last_first)
        compute = partial(computed, experts, dispatch.groups)
        launched = exchange.launch_outputs(_perhaps_again(again, compute, *arrived))
        yield
        summed = exchange.join_outputs(launched).view_as(hidden)
        return summed if shared is None else summed + shared

    def _routed(
        self, hidden: torch.Tensor, nano_batch: NanoBatch, again: bool
    ) -> tuple[torch.Tensor, Dispatch, Callable[[], None]]:
        found: list[Any] = []

        def route(hidden: torch.Tensor) -> torch.Tensor:
            probs, *rest = self.router(hidden, nano_batch)
            if not found:
                found.extend(rest)
            return probs

        probs = _perhaps_again(again, route, hidden)
        chosen_NE, count = found
        # With ``again`` autograd keeps ``route``, and so ``found``, until a micro-batch's backward ends. So ``found``
        # must not hold tensors. ``route`` runs again in backward, and adds nothing to a list that is not empty.
        found[:] = [None]
        assert self.layer_number is not None

        def make() -> Dispatch:
            rows_G = nano_batch.balance.rows_of_peers(nano_batch)
            return Dispatch.of(chosen_NE, self.router.topk, self.ep_group, rows_G)

        return probs, nano_batch.balance.dispatch(self.layer_number, nano_batch, make), count


def last_of(parts: Parts) -> torch.Tensor:
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found: torch.Tensor = end.value
            return found


def _perhaps_again(again: bool, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Returns ``function(*tensors)``; if ``again``, backward calls ``function`` once more."""
    if not again:
        return function(*tensors)
    computed_twice: torch.Tensor = tensor_parallel.checkpoint(function, False, *tensors)
    return computed_twice


def note_trained_experts(model: torch.nn.Module) -> None:
    """Sets ``is_trained`` of a model's layers with experts; all expert-parallel ranks call this function together."""
    layers = [module for module in model.modules() if isinstance(module, NanoBatchExperts)]
    if not layers:
        return
    trained = [any(weight.requires_grad for weight in layer.parameters()) for layer in layers]
    anywhere = torch.tensor(trained, dtype=torch.int32, device=next(layers[0].parameters()).device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, layers[0].ep_group)
    for layer, each in zip(layers, anywhere.tolist(), strict=True):
        layer.is_trained = bool(each)


def add_biases(model: torch.nn.Module) -> None:
    """Lets Megatron add biases to the outputs of experts' second linear layers.

    Megatron's MLP adds the bias in place. Without ``explicit_expert_comm`` the output may be a view, of which autograd
    allows no change in place.
    """
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.explicit_expert_comm = True


def take_nano_batches(model: torch.nn.Module) -> list[int]:
    """Turns a built model's MoELayers into :class:`NanoBatchExperts`, and their routers into :class:`BalancedRouter`.

    Returns:
        This stage's layers with experts, as numbers in the whole model, from 1.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) is MoELayer]
    add_biases(model)
    for layer in layers:
        layer.__class__ = NanoBatchExperts
        layer.router.__class__ = BalancedRouter
        for parameter in layer.experts.parameters():
            # With allreduce False, DDP adds up gradients over all ranks that hold the same experts. These include
            # tensor-parallel ranks, whose rows differ here. Megatron-Core 0.16.1 sets allreduce False only with several
            # expert-parallel ranks.
            parameter.allreduce = False
            # With sequence_parallel True, Megatron would add up gradients over tensor-parallel ranks once more. This
            # would count rows twice, or mix gradients of different experts.
            parameter.sequence_parallel = False
    return [layer.layer_number for layer in layers]
