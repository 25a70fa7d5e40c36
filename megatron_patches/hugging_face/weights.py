"""Finds each parameter's tensors in a Hugging Face folder, and copies a folder's weights into a built Megatron model.

A *slot* (``slots.py``) links a parameter to the folder's tensors. The slot reads a rank's *share* of the parameter from
these tensors, for example the tensor-parallel part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from megatron.core import parallel_state

from distca.models.description import ModelDescription
from distca.models.hybrid import RECURRENT
from distca.models.layout import OUTPUT
from distca.models.stored import layer_prefix
from distca.models.tensors import TensorFiles
from distca.models.weight_map import WeightMap
from megatron_patches.hugging_face.slots import (
    Columns,
    ExpertOfEachRank,
    HeadRows,
    InputFirst,
    QueryKeyValue,
    Rows,
    Slot,
    Vocabulary,
    Whole,
)
from megatron_patches.te.fp8_weights import set_values

_CHOICE_BIAS = "mlp.router.expert_bias"
"""The end of the name of a router's bias, which is added to experts' scores before experts are chosen."""


def slot_of(parameter: str, layer: int, model: ModelDescription, expert_ranks: int = 1) -> Slot:
    """Returns the slot of a parameter.

    Args:
        parameter: the parameter's name in a GPTModel or HybridModel, on this rank.
        layer: the number of the parameter's layer in the whole model, from 0; any number for a parameter outside of
            layers.
        expert_ranks: number of expert-parallel ranks, which have equally many experts each.
    """
    if parameter == "embedding.word_embeddings.weight":
        return Vocabulary((model.weights.embedding,), model.vocabulary)
    if parameter == "output_layer.weight":
        return Vocabulary((model.weights.embedding if model.tie_embeddings else OUTPUT,), model.vocabulary)
    if parameter in ("decoder.final_layernorm.weight", "decoder.final_norm.weight"):
        return Whole((model.weights.final_norm,))
    # ``name`` is the parameter's name inside the layer. ``symbol`` is the layer's symbol in a pattern, or "".
    place, name = layer_prefix(model.stored_numbers[layer]), parameter.split(".", 3)[3]
    stored, symbol = model.weights, model.hybrid.symbols(model.layers)[layer:][:1]
    kind = name.rpartition(".")[2]
    if model.latent.kv_rank and (found := _latent_slot(name, place, model)) is not None:
        return found
    if (norm := _norms(stored).get(name)) is not None:
        return Whole((f"{place}{norm}.weight",))
    if symbol and symbol in RECURRENT:
        return _of_recurrent(name.partition(".")[2], place, symbol, model)
    if name.startswith("self_attention.linear_qkv."):
        names = tuple(f"{place}{part}.{kind}" for part in stored.query_key_value)
        gated = model.hybrid.output_gate
        return QueryKeyValue(names, model.heads // model.kv_heads, model.kv_heads, model.head_dim, gated)
    if name == "self_attention.core_attention.softmax_offset":
        return Rows((f"{place}{stored.sinks}",), ((model.heads,),))
    if name == "self_attention.linear_proj.bias":
        return Whole((f"{place}{stored.attention_output}.bias",))
    if name == "self_attention.linear_proj.weight":
        return Columns((f"{place}{stored.attention_output}.weight",), model.heads * model.value_dim)
    if name == _CHOICE_BIAS:
        return Whole((f"{place}{stored.experts.choice_bias}",))
    if name.startswith("mlp.shared_experts."):
        parts, shared = stored.experts, model.experts.shared_ffn
        if name == "mlp.shared_experts.linear_fc1.weight":
            return _gate_up(tuple(f"{place}{part}.weight" for part in parts.shared_gate_up), shared, gated=True)
        if name == "mlp.shared_experts.gate_weight":
            return Whole((f"{place}{parts.shared_gate}.weight",))
        assert name == "mlp.shared_experts.linear_fc2.weight", f"{parameter} belongs to no supported shared expert"
        return Columns((f"{place}{parts.shared_down}.weight",), shared)
    if name.startswith("mlp.router."):
        return Whole((f"{place}{stored.experts.router}.{kind}",))
    if name.startswith("mlp.experts."):
        own, number = model.experts.count // expert_ranks, int(name.split(".")[3])
        # With 4 experts on 2 ranks, number 1 is expert 1 on rank 0 and expert 3 on rank 1.
        experts = range(number, model.experts.count, own)
        return ExpertOfEachRank(tuple(_of_expert(name, place, expert, model) for expert in experts))
    if name.startswith("mlp.linear_fc1."):
        return _gate_up(tuple(f"{place}{part}.{kind}" for part in stored.gate_up), model.ffn, model.variant.gated)
    if name == "mlp.linear_fc2.bias":
        return Whole((f"{place}{stored.down}.bias",))
    assert name == "mlp.linear_fc2.weight", f"{parameter} is no parameter of a model that is supported"
    return Columns((f"{place}{stored.down}.weight",), model.ffn)


def _latent_slot(name: str, place: str, model: ModelDescription) -> Slot | None:
    """Returns the slot of a projection or norm that only multi-latent attention has; None for another parameter."""
    names, latent = model.weights.latent, model.latent
    of_heads = {
        "linear_q_proj": (names.query, model.head_dim),
        "linear_q_up_proj": (names.query_up, model.head_dim),
        "linear_kv_up_proj": (names.up, latent.key_dim + latent.value_dim),
    }
    replicated = {
        "linear_q_down_proj": names.query_down,
        "q_layernorm": names.query_norm,
        "linear_kv_down_proj": names.down,
        "kv_layernorm": names.norm,
    }
    part = name.removeprefix("self_attention.").removesuffix(".weight")
    if part in replicated:
        return Whole((f"{place}{replicated[part]}.weight",))
    if part in of_heads:
        stored, width = of_heads[part]
        return Rows((f"{place}{stored}.weight",), ((model.heads * width,),))
    return None


def _of_expert(name: str, place: str, number: int, model: ModelDescription) -> Slot:
    stored, ffn = model.weights.experts, model.experts.ffn
    linear, kind = name.split(".")[-2:]
    parts = stored.gate_up if linear == "linear_fc1" else (stored.down,)
    names = tuple(place + stored.of(number, part, kind) for part in parts)
    if stored.input_first:
        return InputFirst(names, in_turn=linear == "linear_fc1")
    assert kind == "weight", f"{name} is no parameter of an expert that is supported"
    return _gate_up(names, ffn, gated=True) if linear == "linear_fc1" else Columns(names, ffn)


def _gate_up(names: tuple[str, ...], rows: int, gated: bool) -> Slot:
    """Returns the slot of an MLP's up projection, or of its gate and up projections of ``rows`` rows each.

    ``names`` may have one tensor for each projection, or a single tensor for both."""
    parts = (rows,) * (1 + gated)
    return Rows(names, (parts,) if len(names) == 1 else tuple((part,) for part in parts))


def _of_recurrent(name: str, place: str, mixer: str, model: ModelDescription) -> Slot:
    hybrid, stored = model.hybrid, model.weights.recurrent

    def whole_name(part: str) -> str:
        return place + stored.name(part)

    if name == "in_proj.weight":
        # Megatron's one projection has several parts. Each tensor of the folder has the next ``count`` of them.
        rows = iter(hybrid.projected(mixer))
        parts = tuple(tuple(islice(rows, count)) for _, count in stored.projections)
        names = tuple(whole_name(f"{each}.weight") for each, _ in stored.projections)
        return HeadRows(names, parts, hybrid.key_heads) if stored.by_key_head else Rows(names, parts)
    if name.startswith("conv1d"):
        return Rows((whole_name(name.replace("_", ".")),), (hybrid.convolved(mixer),))
    if name in ("dt_bias", "A_log", "D"):
        return Rows((whole_name(name),), ((hybrid.value_heads,),))
    if name == "out_norm.weight":
        return Whole((whole_name("norm.weight"),))
    if name == "norm.weight":
        return Rows((whole_name(name),), ((hybrid.values,),))
    assert name == "out_proj.weight", f"{name} is no parameter of a recurrent layer that is supported"
    return Columns((whole_name(name),), hybrid.values)


def _norms(stored: WeightMap) -> dict[str, str]:
    """Returns a dict from the name of a norm's weight in Megatron's layers to the norm's name in the folder."""
    return {
        "norm.weight": stored.attention_norm,
        "input_layernorm.weight": stored.attention_norm,
        "post_attention_layernorm.weight": stored.attention_post_norm,
        "pre_mlp_layernorm.weight": stored.mlp_norm,
        "post_mlp_layernorm.weight": stored.mlp_post_norm,
        "self_attention.q_layernorm.weight": stored.query_norm,
        "self_attention.k_layernorm.weight": stored.key_norm,
    }


def slots(gpt: Any, model: ModelDescription) -> Iterator[tuple[torch.nn.Parameter, Slot]]:
    """Yields each parameter of a model on this rank, with the parameter's slot."""
    for name, parameter in gpt.named_parameters():
        found = re.match(r"decoder\.layers\.(\d+)\.", name)
        layer = gpt.decoder.layers[int(found[1])].layer_number - 1 if found else -1
        yield parameter, slot_of(name, layer, model, parallel_state.get_expert_model_parallel_world_size())


def biases_of_choice(gpt: Any, model: ModelDescription) -> Iterator[tuple[torch.Tensor, Slot]]:
    """Yields each router's bias on experts' scores, with the bias's slot. :func:`slots` yields no buffers."""
    for name, buffer in gpt.named_buffers():
        if name.endswith(_CHOICE_BIAS):
            layer = gpt.decoder.layers[int(name.split(".")[2])].layer_number - 1
            yield buffer, slot_of(name, layer, model)


def group_of(slot: Slot) -> torch.distributed.ProcessGroup:
    """Returns the group of ranks that together have all shares of a slot's parameter."""
    if slot.by_expert:
        return parallel_state.get_expert_model_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def load_weights(
    gpt: Any, model: ModelDescription, files: TensorFiles, advance: Callable[[int], object] = lambda size: None
) -> None:
    """Copies this rank's shares of a folder's tensors into a built model, in the model's dtype.

    Args:
        gpt: this rank's part of a GPTModel or a HybridModel, not yet inside DistributedDataParallel.
        files: the folder's tensors, whose ``check`` has passed.
        advance: is called after each parameter, with the bytes of this rank's share in the folder's dtype. FP8 and
            MXFP4 count as bfloat16.

    Raises:
        ModelError: a file can no longer be read.
    """
    for parameter, slot in slots(gpt, model):
        group = group_of(slot)
        share = slot.share(files, group.rank(), group.size())
        assert share.shape == parameter.shape, f"{slot.names}: {share.shape} for {parameter.shape}"
        set_values(parameter, share)
        advance(share.numel() * share.element_size())
    for buffer, slot in biases_of_choice(gpt, model):
        buffer.copy_(slot.share(files, 0, 1))
