"""Weights of experts at a start on CPUs, where Megatron draws the same ones on every expert-parallel rank."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel

from megatron_patches.model.whole_parameters import first_expert

_LAYERS, _EXPERTS = 1_000_003, 1_009
"""Strides between the seeds of layers and of experts."""


def draw_experts(model: GPTModel, seed: int) -> None:
    """Draw the weights of this rank's experts, each from a seed of its own, whatever rank has it.

    Args:
        model: as Megatron built it on the CPU.
        seed: of the run.
    """
    first, config = first_expert(model), model.config
    assert config.init_method is not None and config.output_layer_init_method is not None
    for layer in model.decoder.layers:
        for number, expert in enumerate(getattr(getattr(layer.mlp, "experts", None), "local_experts", ())):
            with torch.random.fork_rng(devices=()), torch.no_grad():
                torch.manual_seed(seed + _LAYERS * layer.layer_number + _EXPERTS * (first + number))
                config.init_method(expert.linear_fc1.weight)
                config.output_layer_init_method(expert.linear_fc2.weight)
