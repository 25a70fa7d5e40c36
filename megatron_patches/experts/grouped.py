"""Computes all experts of a rank together if possible, in place of the loop in Megatron's SequentialMLP.

A *pair* is a row and one of this rank's experts that the row goes to. A row that goes to two experts makes two pairs.
One *grouped product* multiplies each pair's row by the weight matrix of the pair's expert, for all pairs together.

Shape suffixes: P pairs, sorted by expert; H hidden; F columns of an expert's first product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP

from distca.ops.grouped_linear import Groups, add_biases, grouped_linear, lie_evenly
from distca.ops.swiglu import swiglu
from megatron_patches.model.added_to_forward import added_to_forward
from megatron_patches.patches.fused_ops import gate_of


@dataclass(frozen=True)
class FoundExperts:
    """A layer's experts on this rank, and how they are computed.

    Lists follow the order of experts in which pairs are sorted.

    Attributes:
        module: Megatron's experts.
        weights: those of the first linear layers, and those of the second. None if Megatron's loop must run, because
            grouped products would compute something else than the loop. An example is a linear layer with hooks or a
            forward of its own.
        biases: those of the first linear layers, and those of the second; None without biases or ``weights``.
        last_first: whether the last expert's pairs come first. This is so if the experts' weights lie in memory in
            reverse order, as Megatron's DDP with a distributed optimizer lays them. In any other order of experts, a
            grouped product would first copy all weights.
    """

    module: SequentialMLP
    weights: tuple[list[Any], list[Any]] | None
    biases: tuple[list[Any], list[Any]] | None
    last_first: bool

    @classmethod
    def of(cls, module: SequentialMLP) -> FoundExperts:
        """Looks at each expert. This takes long on the host, so callers keep the result for a micro-batch."""
        first: list[Any] = [expert.linear_fc1 for expert in module.local_experts]
        second: list[Any] = [expert.linear_fc2 for expert in module.local_experts]
        if not all(map(_is_bare, first + second)) or module.config.activation_func_fp8_input_store:
            return cls(module, None, None, False)
        weights = [linear.weight for linear in first], [linear.weight for linear in second]
        biases = None
        if first[0].bias is not None:
            biases = [linear.bias for linear in first], [linear.bias for linear in second]
        last_first = all(lie_evenly(each[::-1]) for each in weights)
        if last_first:
            for each in (*weights, *(biases or ())):
                each.reverse()
        return cls(module, weights, biases, last_first)


def computed(experts: FoundExperts, groups: Groups, rows_PH: torch.Tensor, probs_P: torch.Tensor) -> torch.Tensor:
    """Returns [P, H] the output of each pair's expert, times the pair's probability.

    ``groups`` has the number of pairs of each expert, in the order that ``experts.last_first`` says.
    """
    config = experts.module.config
    if experts.weights is None:
        output: torch.Tensor = experts.module(rows_PH, torch.tensor(groups.rows), probs_P)[0]
        return output
    first, second = experts.weights
    fused = bool(config.gradient_accumulation_fusion)
    inner = grouped_linear(rows_PH, first, groups, fused)
    if experts.biases is not None:
        inner = add_biases(inner, experts.biases[0], groups)
    activated = _activated(config, inner, probs_P)
    output = grouped_linear(activated, second, groups, fused)
    if experts.biases is not None:
        output = add_biases(output, experts.biases[1], groups, probs_P)
    return output


def _is_bare(linear: Any) -> bool:
    served = type(linear) in (ColumnParallelLinear, RowParallelLinear) and (linear.bias is None or linear.skip_bias_add)
    return served and not added_to_forward(linear)


def _activated(config: TransformerConfig, x_PF: torch.Tensor, probs_P: torch.Tensor) -> torch.Tensor:
    """Returns the activation times each pair's probability: [P, F], or [P, F / 2] with a gate."""
    if (gate_and_up := gate_of(config)) is not None:
        return swiglu(x_PF, probs_P, gate_and_up)
    function, probs = config.activation_func, probs_P[:, None]
    if not config.gated_linear_unit:
        return (function(x_PF) * probs).to(x_PF.dtype)
    gate, up = x_PF.chunk(2, dim=-1)
    if (most := config.activation_func_clamp_value) is not None:
        gate, up = gate.clamp(max=most), up.clamp(-most, most)
    return (function(gate) * (up + config.glu_linear_offset) * probs).to(x_PF.dtype)
