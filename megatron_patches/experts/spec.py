"""Makes Megatron's layer specs for models in which layers may have experts in place of an MLP."""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from distca.errors import SupportError


class DrawnExperts(SequentialMLP):
    """Megatron's SequentialMLP (one MLP for each expert) with other initial weights on the CPU.

    With CPU initialization, Megatron draws the same weights on every expert-parallel rank. Here each rank draws the
    weights of all ranks' experts and keeps those of its own. So weights do not depend on the number of ranks.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: Any, **options: Any) -> None:
        mine, ranks = 0, 1
        if config.use_cpu_initialization and config.perform_initialization:
            mine, ranks = options["pg_collection"].ep.rank(), options["pg_collection"].ep.size()
        for rank in range(ranks):
            build = super().__init__ if rank == mine else SequentialMLP
            build(num_local_experts, config, submodules, **options)


def has_experts(config: TransformerConfig) -> list[bool]:
    """Returns for each layer of the whole model whether it has experts.

    ``moe_layer_freq`` is N if layers 0, N, 2N and so on have experts; or a list with 1 for such layers, else 0.

    Raises:
        SupportError: ``moe_layer_freq`` has a wrong form.
    """
    if not config.num_moe_experts:
        return [False] * config.num_layers
    pattern: Any = config.moe_layer_freq
    if isinstance(pattern, int) and pattern > 0:
        return [number % pattern == 0 for number in range(config.num_layers)]
    listed = isinstance(pattern, list | tuple) and len(pattern) == config.num_layers
    if listed and all(each in (0, 1) for each in pattern):
        return [bool(each) for each in pattern]
    raise SupportError(
        f"moe_layer_freq is {pattern!r}, but the model has {config.num_layers} layers: set moe_layer_freq to a number "
        "N above 0, so that layers 0, N, 2N and so on have experts, or to a list with a 1 for each layer with "
        "experts, and a 0 for each other layer."
    )


def with_experts(dense: ModuleSpec, config: TransformerConfig) -> list[ModuleSpec]:
    """Returns a spec for each layer of this pipeline stage: ``dense``, or a copy with experts in place of the MLP."""
    first = get_transformer_layer_offset(config)
    mine = has_experts(config)[first : first + get_num_layers_to_build(config)]
    if not any(mine):
        return [dense] * len(mine)
    mixture = copy(dense)
    mixture.submodules = deepcopy(dense.submodules)
    mixture.submodules.mlp = experts_spec(config)
    return [mixture if each else dense for each in mine]


def experts_spec(config: TransformerConfig) -> Any:
    """Returns the ``mlp`` spec of a layer with experts: a ModuleSpec, or in newer Megatron-Core a functools.partial."""
    # Without Transformer Engine, Megatron-Core 0.16.1 does not define te_general_gemm, but its router reads this name.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    if isinstance(spec, ModuleSpec):
        experts = spec.submodules.experts
        spec.submodules = replace(spec.submodules, experts=ModuleSpec(DrawnExperts, submodules=experts.submodules))
        return spec
    parts = spec.keywords["submodules"]
    experts = partial(DrawnExperts, **parts.experts.keywords)
    return partial(spec.func, submodules=replace(parts, experts=experts))
