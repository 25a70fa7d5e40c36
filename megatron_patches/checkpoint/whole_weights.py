"""Writes checkpoints of weights alone, and reads weights of Megatron checkpoints as tensors of a Hugging Face folder.

No model is built for reading. The names of parameters come from tables here and in ``hybrid_names.py``. A *slot*
(``hugging_face/slots.py``) says which of the folder's tensors make up a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.models.gpt import GPTModel
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from distca.errors import ModelError
from distca.models.description import ModelDescription
from distca.models.hybrid import EXPERTS, RECURRENT
from distca.models.layout import expected_shapes
from distca.models.stored import tensor_and_piece
from megatron_patches.checkpoint.hybrid_names import parameters_of, saved_as
from megatron_patches.checkpoint.unpickling import check_small_files, readable
from megatron_patches.checkpoint.writer import TorchWriter
from megatron_patches.hugging_face.slots import Slot
from megatron_patches.hugging_face.weights import slot_of

_Member = tuple[int, int]
"""The number of a layer or expert, and how many of them a checkpoint's tensor stacks along its first dimension."""
_Parameter = tuple[tuple[str, ...], _Member | None, Slot]
"""A parameter of the model: its keys in the checkpoint, which member of a stack it is or None, and its slot.

Tensors of several keys are concatenated along the first dimension.
"""

_LAYER = (
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_q_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.kv_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.core_attention.softmax_offset",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
    "mlp.router.weight",
    "mlp.router.bias",
    "mlp.router.expert_bias",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_experts.gate_weight",
    "post_mlp_layernorm.weight",
)
"""The parameters that a layer may have, in the order of reading, except routed experts' and recurrent layers'."""

_SAVED_AS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Checkpoints of models without latent attention have these two norms under Transformer Engine's names."""

_EXPERTS = tuple(f"mlp.experts.experts.{part}" for part in ("linear_fc1.weight", "linear_fc2.weight"))
_EXPERT_BIASES = tuple(f"mlp.experts.experts.{part}" for part in ("linear_fc1.bias", "linear_fc2.bias"))
"""The keys of experts' weights and biases. Each tensor stacks all experts of a layer."""


def _has(model: ModelDescription, part: str, mixture: bool) -> bool:
    """Returns whether a layer has the parameter ``part``. With ``mixture`` it has experts in place of an MLP."""
    variant, experts = model.variant, model.experts
    shared = mixture and experts.shared_ffn > 0
    # latent: multi-head latent attention. low: its queries have a down-projection too.
    latent, low = model.latent.kv_rank > 0, model.latent.q_rank > 0
    absent = {
        "self_attention.linear_qkv.bias": not model.qkv_bias,
        "self_attention.core_attention.softmax_offset": not model.sinks,
        "self_attention.linear_proj.bias": not variant.attention_output_bias,
        "mlp.linear_fc1.weight": mixture,
        "mlp.linear_fc1.bias": mixture or not variant.mlp_bias,
        "mlp.linear_fc2.weight": mixture,
        "mlp.linear_fc2.bias": mixture or not variant.mlp_bias,
        "mlp.router.weight": not mixture,
        "mlp.router.bias": not (mixture and experts.biases),
        "mlp.router.expert_bias": not (mixture and experts.bias),
        "mlp.shared_experts.linear_fc1.weight": not shared,
        "mlp.shared_experts.linear_fc2.weight": not shared,
        "self_attention.linear_qkv.weight": latent,
        "self_attention.linear_q_proj.weight": not latent or low,
        "self_attention.linear_q_down_proj.weight": not low,
        "self_attention.linear_q_up_proj.weight": not low,
        "self_attention.linear_kv_down_proj.weight": not latent,
        "self_attention.kv_layernorm.weight": not latent,
        "self_attention.linear_kv_up_proj.weight": not latent,
        "self_attention.q_layernorm.weight": not (model.qk_norm or low),
        "mlp.shared_experts.gate_weight": not (shared and experts.shared_gate),
        "self_attention.k_layernorm.weight": not model.qk_norm,
        "input_layernorm.weight": variant.norms == "post",
        "pre_mlp_layernorm.weight": variant.norms == "post" or variant.parallel_mlp,
        "post_attention_layernorm.weight": variant.norms == "pre",
        "post_mlp_layernorm.weight": variant.norms == "pre",
    }
    return not absent.get(part, False)


def save_weights(gpt: GPTModel, path: Path) -> None:
    """Writes a checkpoint of a model's weights alone to an existing empty folder; all ranks call it together."""
    from megatron.core import parallel_state

    writer = FullyParallelSaveStrategyWrapper(TorchWriter(), parallel_state.get_data_parallel_group())
    dist_checkpointing.save({"model": gpt.sharded_state_dict()}, str(path), writer)


class SavedWeights:
    """The weights of a checkpoint, as tensors of a Hugging Face folder.

    Raises:
        UnreadableError: a file is damaged, or names functions to run. No function was run.
    """

    def __init__(self, path: Path, model: ModelDescription) -> None:
        self._path, self._model = path, model
        with readable():
            check_small_files(path)
            self._metadata = checkpoint.FileSystemReader(path).read_metadata()

    def names(self) -> list[str]:
        """Returns the tensors' names in the Hugging Face folder, in the order of :meth:`tensors`."""
        return [name for _, _, slot in self._parts() for name in slot.names]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor of the Hugging Face folder as (name, tensor), in the checkpoint's dtype.

        One parameter at a time is in memory.

        Raises:
            ModelError: the checkpoint lacks a parameter of the model, has another number of layers or experts, or has a
                tensor of another shape.
            UnreadableError: a parameter cannot be read.
        """
        self._check_layers()
        shapes = expected_shapes(self._model)
        for keys, member, slot in self._parts():
            parts = [self._read(key, member) for key in keys]
            parameter = parts[0] if len(parts) == 1 else torch.cat(parts)
            try:
                tensors = slot.tensors([parameter])
            except RuntimeError as error:  # torch's, for a parameter that cannot be split into the tensors
                raise ModelError(
                    f"{self._path} has shape {list(parameter.shape)} for {keys[0]}, which does not fit the model that "
                    f"its configuration describes ({str(error).splitlines()[0]})."
                ) from None
            for name, tensor in zip(slot.names, tensors, strict=True):
                whole, piece = tensor_and_piece(name)
                needed = shapes[whole] if piece is None else shapes[whole][1:]
                if tuple(tensor.shape) != needed:
                    raise ModelError(
                        f"{self._path} has shape {list(tensor.shape)} for {name}, and the model that its configuration "
                        f"describes needs {list(needed)}."
                    )
                yield name, tensor

    def _check_layers(self) -> None:
        """Refuses keys of more layers than the model has. :meth:`_read` refuses fewer, and stacks of another size."""
        found = (re.match(r"decoder\.layers\.(\d+)\.", key) for key in self._metadata.state_dict_metadata)
        layers = 1 + max((int(each[1]) for each in found if each), default=-1)
        if layers > self._model.layers:
            raise ModelError(
                f"{self._path} has {layers} layers, but the model that its configuration describes has "
                f"{self._model.layers}."
            )

    def _parts(self) -> Iterator[_Parameter]:
        model, name = self._model, "embedding.word_embeddings.weight"
        yield (name,), None, slot_of(name, -1, model)
        hybrid = bool(model.hybrid.pattern)
        yield from self._of_hybrid() if hybrid else self._of_layers()
        last = f"decoder.{'final_norm' if hybrid else 'final_layernorm'}.weight"
        for name in (last, *(() if model.tie_embeddings else ("output_layer.weight",))):
            yield (name,), None, slot_of(name, -1, model)

    def _of_hybrid(self) -> Iterator[_Parameter]:
        model = self._model
        for layer, symbol in enumerate(model.hybrid.symbols(model.layers)):
            place = f"decoder.layers.{layer}"
            of_layer = [each for each in _LAYER if _has(model, each, mixture=symbol == EXPERTS)]
            for part in parameters_of(symbol, of_layer):
                keys = saved_as(symbol, part) if symbol in RECURRENT else (_SAVED_AS.get(part, part),)
                yield tuple(f"{place}.{key}" for key in keys), None, slot_of(f"{place}.{part}", layer, model)
            if symbol == EXPERTS:
                yield from self._of_experts(layer)

    def _of_layers(self) -> Iterator[_Parameter]:
        model = self._model
        for layer, kind in enumerate(model.layer_kinds):
            mixture = kind.mlp.experts.count > 0
            # In checkpoints of models without experts, each tensor stacks all layers.
            stacked = not model.experts.count
            place, member = ("decoder.layers", (layer, model.layers)) if stacked else (f"decoder.layers.{layer}", None)
            for part in _LAYER:
                if _has(model, part, mixture):
                    slot = slot_of(f"decoder.layers.{layer}.{part}", layer, model)
                    key = part if model.latent.kv_rank else _SAVED_AS.get(part, part)
                    yield (f"{place}.{key}",), member, slot
            if mixture:
                yield from self._of_experts(layer)

    def _of_experts(self, layer: int) -> Iterator[_Parameter]:
        model, place, count = self._model, f"decoder.layers.{layer}", self._model.experts.count
        for expert in range(count):
            for part in (*_EXPERTS, *(_EXPERT_BIASES if model.experts.biases else ())):
                name = part.replace("experts.experts", f"experts.local_experts.{expert}")
                yield (f"{place}.{part}",), (expert, count), slot_of(f"{place}.{name}", layer, model)

    def _read(self, key: str, member: _Member | None) -> torch.Tensor:
        """Returns the tensor under ``key``, or with ``member`` the slice of one layer or expert."""
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ModelError(f"{self._path} lacks the weight {key} of the model that its configuration describes.")
        size, begin = list(stored.size), [0] * len(stored.size)
        if member is not None:
            number, count = member
            if size[:1] != [count]:  # torch would read nothing of a slice behind the tensor's end, without an error
                raise ModelError(
                    f"{self._path} has shape {size} for {key}, but for the model that its configuration describes the "
                    f"first number would be {count}."
                )
            size[0], begin[0] = 1, number
        tensor = torch.empty(size, dtype=stored.properties.dtype)
        planner = _PartPlanner(key, stored, begin)
        reader = _PartReader(self._path, self._metadata)
        with readable():
            checkpoint.load({key: tensor}, storage_reader=reader, planner=planner, no_dist=True)
        return tensor if member is None else tensor[0]


class _PartReader(checkpoint.FileSystemReader):
    """torch's reader, which does not read ``.metadata`` again."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


class _PartPlanner(checkpoint.DefaultLoadPlanner):
    """Makes torch's reader read a part of a stored tensor into a tensor of the part's shape.

    ``begin`` has the first index of the part in each dimension.
    """

    def __init__(self, key: str, stored: TensorStorageMetadata, begin: Sequence[int]) -> None:
        super().__init__()
        self._key, self._stored, self._begin = key, stored, torch.Size(begin)

    def create_local_plan(self) -> LoadPlan:
        part = ChunkStorageMetadata(self._begin, self.state_dict[self._key].size())
        return LoadPlan(create_read_items_for_chunk_list(self._key, self._stored, [part]))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[self._key]
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Does nothing: the reader has written into resolve_tensor's view."""
