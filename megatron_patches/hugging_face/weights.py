"""The parameters of a GPTModel and the tensors of a Hugging Face folder: which are which, and how they are cut.

Each kind of parameter is a class: it knows the tensors it is made of, this tensor-parallel rank's share of them, and
the way back from all ranks' shares. Shares are read where they are needed, so that no rank holds more than its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from distca.models.description import ModelDescription
from distca.models.layout import EMBEDDING, FINAL_NORM, OUTPUT, layer_prefix
from distca.models.tensors import TensorFiles
from distca.models.weight_map import WeightMap
from megatron_patches.support.experts import refuse_experts
from megatron_patches.te.fp8_weights import set_values


class Slot(Protocol):
    """The link between a parameter and the tensors of a folder that it is made of.

    Attributes:
        names: of the folder's tensors.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        """The parameter on one of ``ranks`` tensor-parallel ranks, in the files' type."""
        ...

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The folder's tensors, by ``names``, from all ranks' shares."""
        ...


@dataclass(frozen=True)
class _Whole:
    """A norm's weight, or a bias behind all ranks' sum, alike on all ranks."""

    names: tuple[str, ...]

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        return files.read(self.names[0])

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (shares[0],)


@dataclass(frozen=True)
class _Vocabulary:
    """Rows by token id, with rows of zeros up to a multiple of the ranks."""

    names: tuple[str, ...]
    vocabulary: int

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        rows = -(-self.vocabulary // ranks)
        first, last = (min((rank + more) * rows, self.vocabulary) for more in (0, 1))
        real = files.read(self.names[0], slice(first, last))
        return real if len(real) == rows else torch.nn.functional.pad(real, (0, 0, 0, rows - len(real)))

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (torch.cat(list(shares))[: self.vocabulary],)


@dataclass(frozen=True)
class _Heads:
    """A number for each query head, which are cut."""

    names: tuple[str, ...]
    heads: int

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        own = self.heads // ranks
        return files.read(self.names[0], slice(rank * own, (rank + 1) * own))

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (torch.cat(list(shares)),)


@dataclass(frozen=True)
class _Columns:
    """A projection whose input is cut."""

    names: tuple[str, ...]
    columns: int

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        own = self.columns // ranks
        return files.read(self.names[0], slice(None), slice(rank * own, (rank + 1) * own))

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (torch.cat(list(shares), dim=1),)


def _rows(files: TensorFiles, names: Sequence[str], sizes: Sequence[int], part: int, rows: slice) -> torch.Tensor:
    """Rows of a part. It is a tensor of its own, or lies behind the parts before it in a single one."""
    if len(names) == len(sizes):
        return files.read(names[part], rows)
    skipped = sum(sizes[:part])
    return files.read(names[0], slice(skipped + rows.start, skipped + rows.stop))


def _stored(names: Sequence[str], parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors that hold these parts: one each, or a single one."""
    return tuple(parts) if len(names) == len(parts) else (torch.cat(list(parts)),)


@dataclass(frozen=True)
class _GateUp:
    """On each rank its rows of the gate, where there is one, then those of the up projection; weights or biases."""

    names: tuple[str, ...]
    rows: int
    gated: bool

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        own, sizes = self.rows // ranks, [self.rows] * (1 + self.gated)
        rows = slice(rank * own, (rank + 1) * own)
        return torch.cat([_rows(files, self.names, sizes, part, rows) for part in range(len(sizes))])

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        parts = [torch.cat(cut) for cut in zip(*(share.chunk(1 + self.gated) for share in shares), strict=True)]
        return _stored(self.names, parts)


@dataclass(frozen=True)
class _QueryKeyValue:
    """For each of the rank's groups its query heads, its key and its value; weights or biases."""

    names: tuple[str, ...]
    queries: int
    groups: int
    head_dim: int

    def share(self, files: TensorFiles, rank: int, ranks: int) -> torch.Tensor:
        own, widths = self.groups // ranks, self._widths()
        sizes, parts = [self.groups * width for width in widths], []
        for number, width in enumerate(widths):
            rows = slice(rank * own * width, (rank + 1) * own * width)
            parts.append(_rows(files, self.names, sizes, number, rows).unflatten(0, (own, width)))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def tensors(self, shares: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        widths = self._widths()
        groups = torch.cat([share.unflatten(0, (-1, sum(widths))) for share in shares])
        return _stored(self.names, [part.flatten(0, 1) for part in groups.split(widths, dim=1)])

    def _widths(self) -> list[int]:
        """Rows of a group in q, in k and in v."""
        return [heads * self.head_dim for heads in (self.queries, 1, 1)]


def slot_of(parameter: str, layer: int, model: ModelDescription) -> Slot:
    """Returns the slot of a parameter: the tensors of a folder that it is made of.

    Args:
        parameter: its name in a GPTModel.
        layer: number of its layer in the whole model; not read where it is in none.
        model: what the folder holds.
    """
    if parameter == "embedding.word_embeddings.weight":
        return _Vocabulary((EMBEDDING,), model.vocabulary)
    if parameter == "output_layer.weight":
        return _Vocabulary((EMBEDDING if model.tie_embeddings else OUTPUT,), model.vocabulary)
    if parameter == "decoder.final_layernorm.weight":
        return _Whole((FINAL_NORM,))
    place, name, stored = layer_prefix(layer), parameter.split(".", 3)[3], model.weights
    kind = name.rpartition(".")[2]
    if (norm := _norms(stored).get(name)) is not None:
        return _Whole((f"{place}{norm}.weight",))
    if name.startswith("self_attention.linear_qkv."):
        names = tuple(f"{place}{part}.{kind}" for part in stored.query_key_value)
        return _QueryKeyValue(names, model.heads // model.kv_heads, model.kv_heads, model.head_dim)
    if name == "self_attention.core_attention.softmax_offset":
        return _Heads((f"{place}{stored.sinks}",), model.heads)
    if name == "self_attention.linear_proj.bias":
        return _Whole((f"{place}{stored.attention_output}.bias",))
    if name == "self_attention.linear_proj.weight":
        return _Columns((f"{place}{stored.attention_output}.weight",), model.heads * model.head_dim)
    if name.startswith("mlp.linear_fc1."):
        return _GateUp(tuple(f"{place}{part}.{kind}" for part in stored.gate_up), model.ffn, model.variant.gated)
    if name == "mlp.linear_fc2.bias":
        return _Whole((f"{place}{stored.down}.bias",))
    assert name == "mlp.linear_fc2.weight", f"{parameter} is no parameter of a model that is served"
    return _Columns((f"{place}{stored.down}.weight",), model.ffn)


def _norms(stored: WeightMap) -> dict[str, str]:
    return {
        "input_layernorm.weight": stored.attention_norm,
        "post_attention_layernorm.weight": stored.attention_post_norm,
        "pre_mlp_layernorm.weight": stored.mlp_norm,
        "post_mlp_layernorm.weight": stored.mlp_post_norm,
        "self_attention.q_layernorm.weight": stored.query_norm,
        "self_attention.k_layernorm.weight": stored.key_norm,
    }


def slots(gpt: GPTModel, model: ModelDescription) -> Iterator[tuple[torch.nn.Parameter, Slot]]:
    """Every parameter of this rank's part of a model, and what it is made of.

    Raises:
        SupportError: the model has experts.
    """
    refuse_experts(gpt.config, "a Hugging Face folder")
    for name, parameter in gpt.named_parameters():
        found = re.match(r"decoder\.layers\.(\d+)\.", name)
        layer = gpt.decoder.layers[int(found[1])].layer_number - 1 if found else -1
        yield parameter, slot_of(name, layer, model)


def load_weights(
    gpt: GPTModel, model: ModelDescription, files: TensorFiles, advance: Callable[[int], object] = lambda size: None
) -> None:
    """Copy this rank's shares of a folder's tensors into a built model, in the model's type.

    Args:
        gpt: this rank's part, on its device, not wrapped yet.
        model: what the folder holds; ``files.check`` has passed.
        files: its tensors.
        advance: called with the bytes of each parameter.

    Raises:
        ModelError: a file cannot be read any more.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    for parameter, slot in slots(gpt, model):
        share = slot.share(files, rank, ranks)
        assert share.shape == parameter.shape, f"{slot.names}: {share.shape} for {parameter.shape}"
        set_values(parameter, share)
        advance(share.numel() * share.element_size())
