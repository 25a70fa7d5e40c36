"""Checks the layer spec that a user gives to ``distca.CAD.block_spec``.

A spec names the class of each module of a transformer layer. Megatron's specs are supported, with Megatron's own
modules or Transformer Engine's. Classes of this project may stand in their place. Other classes are refused, because
``layers/block.py`` replaces modules by ones that compute only what the supported classes do.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.errors import SupportError
from megatron_patches.layers.layer import SplitTransformerLayer
from megatron_patches.layers.packed_attention import PackedAttention
from megatron_patches.patches.norms import LayerNorm, LayerNormWithoutBias, RMSNorm

# Megatron's local spec has FusedLayerNorm if Apex is installed. This project's norms take the place of all of these.
_NORMS = (WrappedTorchNorm, FusedLayerNorm, RMSNorm, LayerNorm, LayerNormWithoutBias, TENorm)
_TE_LINEARS = (TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear)
_LOCAL = ": give the spec of megatron's get_gpt_layer_local_spec(normalization='RMSNorm')."


def check_layer_spec(spec: ModuleSpec) -> None:
    """Refuses a layer spec that names a class which is not supported.

    Args:
        spec: the spec of a dense transformer layer, from Megatron's get_gpt_layer_local_spec or
            get_gpt_layer_with_transformer_engine_spec.

    Raises:
        SupportError: a class is not supported, a spec lacks the modules inside it, attention is not causal, or only
            some linear layers are Transformer Engine's.
    """
    if not isinstance(spec, ModuleSpec):
        raise SupportError(
            f"the layer spec is a {type(spec).__name__}, but one ModuleSpec for all layers is needed{_LOCAL}"
        )
    _expect_in_spec("module", spec.module, TransformerLayer, SplitTransformerLayer)
    parts = _submodules("the layer spec", spec)
    for name in ("pre_cross_attn_layernorm", "cross_attention"):
        _expect_in_spec(name, getattr(parts, name), IdentityOp)
    _expect_in_spec("cross_attn_bda", parts.cross_attn_bda, IdentityFuncOp)
    for name in ("self_attn_bda", "mlp_bda"):
        _expect_in_spec(name, getattr(parts, name), get_bias_dropout_add)
    attention = parts.self_attention
    _expect_in_spec("self_attention", _module(attention), SelfAttention)
    heads = _submodules("self_attention of the layer spec", attention)
    mask = attention.params.get("attn_mask_type")
    if mask is not AttnMaskType.causal:
        raise SupportError(
            f"attn_mask_type of the layer spec is {mask}, but only causal attention is supported{_LOCAL}"
        )
    cores = (DotProductAttention, PackedAttention, TEDotProductAttention)
    _expect_in_spec("self_attention.core_attention", heads.core_attention, *cores)
    for name in ("q_layernorm", "k_layernorm"):
        _expect_in_spec(f"self_attention.{name}", getattr(heads, name), IdentityOp, *_NORMS)
    _expect_in_spec("mlp", _module(parts.mlp), MLP)
    linears = _submodules("mlp of the layer spec", parts.mlp)
    _expect_norm_and_linear(parts, "input_layernorm", "self_attention.linear_qkv", heads.linear_qkv)
    _expect_norm_and_linear(parts, "pre_mlp_layernorm", "mlp.linear_fc1", linears.linear_fc1)
    _expect_in_spec("self_attention.linear_proj", heads.linear_proj, RowParallelLinear, TERowParallelLinear)
    _expect_in_spec("mlp.linear_fc2", linears.linear_fc2, RowParallelLinear, TERowParallelLinear)
    _expect_one_kind(
        {
            "self_attention.linear_qkv": heads.linear_qkv,
            "self_attention.linear_proj": heads.linear_proj,
            "mlp.linear_fc1": linears.linear_fc1,
            "mlp.linear_fc2": linears.linear_fc2,
        }
    )


def has_te_linears(spec: ModuleSpec) -> bool:
    """Whether the linear layers of a spec that :func:`check_layer_spec` accepted are Transformer Engine's."""
    return spec.submodules.self_attention.submodules.linear_qkv in _TE_LINEARS


def mlp_submodules(spec: Any) -> Any:
    """Returns the part of an MLP's spec that names the linear layers. Changes of the result change the spec."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def _submodules(path: str, spec: Any) -> Any:
    """Returns the part of a spec that names the modules inside; refuses a spec or a class without it."""
    named = isinstance(spec, ModuleSpec) or (isinstance(spec, functools.partial) and "submodules" in spec.keywords)
    parts = mlp_submodules(spec) if named else None
    if parts is None:
        raise SupportError(f"{path} is {name_of(spec)} without submodules, which are needed{_LOCAL}")
    return parts


def _expect_norm_and_linear(parts: Any, norm: str, path: str, linear: Any) -> None:
    """Refuses a spec unless the norm comes once: as a module, or inside the linear layer."""
    found = getattr(parts, norm)
    if linear is TELayerNormColumnParallelLinear and found is IdentityOp:
        return
    _expect_in_spec(path, linear, ColumnParallelLinear, TEColumnParallelLinear)
    _expect_in_spec(norm, found, *_NORMS)


def _expect_one_kind(linears: dict[str, Any]) -> None:
    """Refuses a spec of which only some linear layers are Transformer Engine's, as CAD gives all one kind."""
    (first, of_first), *others = linears.items()
    for path, linear in others:
        if (linear in _TE_LINEARS) != (of_first in _TE_LINEARS):
            raise SupportError(
                f"{path} of the layer spec is {name_of(linear)}, but {first} is {name_of(of_first)}, and all linear "
                f"layers must be Megatron's or all Transformer Engine's{_LOCAL}"
            )


def _module(spec: Any) -> Any:
    # For an MLP, newer versions of Megatron-Core give a partial of one of its class methods in place of a ModuleSpec.
    if isinstance(spec, functools.partial):
        return getattr(spec.func, "__self__", spec.func)
    return spec.module if isinstance(spec, ModuleSpec) else spec


def _expect_in_spec(path: str, found: Any, *supported: Any) -> None:
    if found not in supported:
        twice = ", whose norm would be applied twice" if "LayerNormColumn" in name_of(found) else ""
        raise SupportError(
            f"{path} of the layer spec is {name_of(found)}{twice}, but {name_of(supported[0])} is supported there"
            f"{_LOCAL}"
        )


def name_of(found: Any) -> str:
    """Returns the name of a class, of a function, or of the class that a spec builds."""
    return str(getattr(_module(found), "__name__", found))
