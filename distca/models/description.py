"""The model that the config.json of a Hugging Face folder describes, or why it is not served. No torch and no package
is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distca.errors import ModelError, system_words
from distca.json_file import read_json
from distca.models.experts import Experts
from distca.models.families import COMPOSITES, FAMILIES, known_fields
from distca.models.families.common import COMMON, ELSEWHERE
from distca.models.families.family import Composite, Family
from distca.models.families.unserved import UNSERVED
from distca.models.fields import Read, Values, read_fields
from distca.models.hybrid import ATTENTION, EXPERTS, MLP, Hybrid, shortest
from distca.models.latent import Latent
from distca.models.quantised import FP8_BLOCK
from distca.models.rope import RopeScaling
from distca.models.rope_fields import Rope, read_rope, split_rope
from distca.models.shape import LayerType, ModelShape
from distca.models.stored import has_tensor, layer_prefix
from distca.models.variant import Variant
from distca.models.weight_map import FUSED, WeightMap
from distca.models.window_fields import read_window
from distca.sizes.head_dims import unserved

CONFIG = "config.json"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class ModelDescription(ModelShape):
    """The model of a folder: its shape, in which head_dim and vocabulary are never 0, and what only folders say.

    Attributes:
        family: its model_type, such as llama.
        positions: max_position_embeddings.
        dtype: of the weights, as config.json has it; None where it does not say.
        quantised: kind of quantised weights in its files, mxfp4 or fp8; None where they are not.
        fused_experts: all experts of a layer lie in one tensor, by the names of :data:`distca.models.weight_map.FUSED`.
        further_layers: layers behind the last one, which predict further tokens and are not trained.
        warnings: sentences on what config.json has and is left out.
    """

    family: str
    positions: int
    dtype: str | None = None
    quantised: str | None = None
    fused_experts: bool = False
    further_layers: int = 0
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def weights(self) -> WeightMap:
        """Names of the tensors of its layers."""
        weights = FAMILIES[text_family(self.family)].weights
        return replace(weights, experts=weights.experts.fused()) if self.fused_experts else weights

    @property
    def stored_parts(self) -> list[tuple[int, str]]:
        """Every mixer, MLP and layer with experts by its symbol, with the number of the folder's layer that has it."""
        symbols = self.hybrid.symbols(self.layers)
        if symbols:
            return list(zip(self.stored_numbers, symbols, strict=True))
        mlps = ((number, EXPERTS if kind.mlp.experts.count else MLP) for number, kind in enumerate(self.layer_kinds))
        return [part for number, mlp in mlps for part in ((number, ATTENTION), (number, mlp))]

    @property
    def stored_numbers(self) -> Sequence[int]:
        """For each layer the number of the folder's layer that has it."""
        split = self.hybrid.pattern and not self.weights.own_mlps
        return self.hybrid.mixers(self.layers) if split else range(self.layers)

    @property
    def other_parts(self) -> tuple[str, ...]:
        """The prefixes of the names of tensors that belong to other parts of the model. Such parts read images, say, or
        predict further tokens."""
        further = range(self.layers, self.layers + self.further_layers)
        others = COMPOSITES[self.family].others if self.family in COMPOSITES else ()
        return (*others, *FAMILIES[text_family(self.family)].others, *(layer_prefix(number) for number in further))

    @property
    def composite(self) -> bool:
        """Whether the text is one part of several, whose tensors' names say so."""
        return self.family in COMPOSITES


def text_family(family: str) -> str:
    """The family of a model's text part, which is the model itself where it has no others."""
    return COMPOSITES[family].families[0] if family in COMPOSITES else family


def scalings(family: str) -> tuple[str, ...]:
    """The kinds of scaling of rotary positions that transformers has in a family's models."""
    return FAMILIES[text_family(family)].rope_kinds


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a config.json that describe the text part."""
    composite = COMPOSITES.get(str(config.get("model_type")))
    return config if composite is None else config.get(composite.text) or {}


def architecture(family: str) -> str:
    """The class of a family's models in transformers."""
    return (COMPOSITES.get(family) or FAMILIES[family]).architecture


def family_of(model: ModelShape) -> str | None:
    """The family whose layers have the model's biases and norms and no more; None where there is none."""
    # LLaMA's class in transformers refuses heads that do not divide hidden; Mistral's computes the same and takes them.
    plain = "mistral" if model.hidden % model.heads else "llama"
    return {(False, False): plain, (True, False): "qwen2", (False, True): "qwen3"}.get((model.qkv_bias, model.qk_norm))


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, as it is.

    Raises:
        ModelError: there is none, or it is no JSON object.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; a folder with {CONFIG} and safetensors files is needed.")
    try:
        content = read_json(path)
        json.dumps(content, indent=1)  # as an export will, which must not fail behind the training
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({system_words(error)}); a model's folder has one.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not the fields of a model.")
    return content


def describe_folder(folder: Path) -> ModelDescription:
    """Returns the description of the model in a folder.

    Raises:
        ModelError: a field is missing, or what it asks for is not served.
    """
    config, where = read_config(folder), str(folder / CONFIG)
    described = describe(config, where)
    described = replace(described, fused_experts=_has_fused_experts(folder, described))
    composite = COMPOSITES.get(config["model_type"])
    if composite is not None and composite.ties and config.get("tie_word_embeddings") is None:
        # Its class ties by default, and does not where the files have an output layer of its own.
        return replace(described, tie_embeddings=not has_tensor(folder, _OUTPUT))
    return described


def _has_fused_experts(folder: Path, model: ModelDescription) -> bool:
    """Whether a folder has all experts of the first layer that has some in one tensor, which its family has not."""
    if not model.experts.count or model.weights.experts.stacked:
        return False
    first = f"{layer_prefix(model.experts.dense_layers)}{FUSED.experts}"
    return any(has_tensor(folder, f"{first}.{part}") for part in (FUSED.down, *FUSED.gate_up))


def describe(config: Mapping[str, Any], where: str) -> ModelDescription:
    """Returns the description of the model that the fields of a config.json stand for.

    Args:
        config: its content.
        where: its name, for messages.

    Raises:
        ModelError: a field is missing, or what it asks for is not served.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or (kind not in FAMILIES and kind not in COMPOSITES):
        raise _unserved(kind, where)
    if kind in FAMILIES:
        return _described(FAMILIES[kind], kind, config, where)
    composite = COMPOSITES[kind]
    whole = _values(composite, kind, config, where)
    inner = whole.read[composite.text]
    inside = f"{composite.text} of {where}"
    family = inner.get("model_type", composite.families[0])
    if family not in composite.families:
        raise ModelError(
            f"{inside} has model_type {family!r}, but of {kind} only {', '.join(composite.families)} is served."
        )
    text = _described(FAMILIES[family], family, {"model_type": family, **inner}, inside)
    ties = whole.read["tie_word_embeddings"]
    return replace(
        text,
        family=kind,
        tie_embeddings=text.tie_embeddings if ties is None else ties,
        dtype=text.dtype or _dtype(whole, where),
        warnings=(*whole.warnings, *text.warnings),
    )


def _unserved(kind: Any, where: str) -> ModelError:
    served = ", ".join([*FAMILIES, *COMPOSITES])
    missing = UNSERVED.get(kind) if isinstance(kind, str) else None
    why = f": of its layers, {missing} are not" if missing else ""
    return ModelError(f"{where} has model_type {kind!r}, but served are {served}{why}.")


def _values(family: Family | Composite, kind: str, config: Mapping[str, Any], where: str) -> Values:
    """The fields of a family's config.json, checked by its table."""
    table = {**COMMON, **family.fields}
    if isinstance(family, Family) and family.quantised:
        table["quantization_config"] = Read("fields", None, optional=True)
    values = read_fields(config, table, where, f"a {kind}", known_fields(), ELSEWHERE)
    for name in values.read["architectures"] or ():
        if name != family.architecture:
            raise ModelError(
                f"{where} has the architecture {name}, but of {kind} only {family.architecture} is served."
            )
    return values


def _described(family: Family, kind: str, config: Mapping[str, Any], where: str) -> ModelDescription:
    values = _values(family, kind, config, where)
    said = values.read
    heads, hidden = (said[name] for name in ("num_attention_heads", "hidden_size"))
    layers, hybrid = _layers(family, said, where)
    experts = _experts(family, said, layers, where)
    kv_heads = said["num_key_value_heads"] or heads
    rope_config, window_base = config, 0.0
    if family.window_rope is not None:
        rope_config, window_base = split_rope(config, family.window_rope, where)
    rope = Rope(ModelShape.rope_base, RopeScaling(original_length=said["max_position_embeddings"]), ())
    if hybrid.rotate:
        rope = read_rope(rope_config, said["max_position_embeddings"], family, where)
    latent = _latent(family, said, rope, where)
    head_dim = latent.head_dim if latent.kv_rank else _head_dim(said.get("head_dim"), hidden, heads, where)
    rotated = latent.rotary_dim if latent.kv_rank else _rotated(head_dim, rope, where)
    if heads % kv_heads:
        raise ModelError(f"{where} has {heads} query heads, which {kv_heads} key and value heads do not divide.")
    if rope.alpha is not None and rotated == 2:
        raise ModelError(f"{where} has heads of 2, for which a scaling with alpha has no base; it needs 4 at least.")
    layer_types, window = read_window(family, said, where)
    quantised = _quantised(family, said, where)
    return ModelDescription(
        family=kind,
        layers=layers,
        hidden=hidden,
        ffn=said.get("intermediate_size") or experts.ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=said["vocab_size"],
        rope_base=rope.base if rope.alpha is None else rope.base * rope.alpha ** (rotated / (rotated - 2)),
        rope_scaling=rope.scaling,
        norm_epsilon=said[family.epsilon],
        tie_embeddings=bool(said["tie_word_embeddings"]),
        qkv_bias=bool(said[family.qkv_bias]) if isinstance(family.qkv_bias, str) else family.qkv_bias,
        qk_norm=bool(said[family.qk_norm]) if isinstance(family.qk_norm, str) else family.qk_norm,
        sinks=family.sinks,
        experts=experts,
        hybrid=hybrid,
        latent=latent,
        positions=said["max_position_embeddings"],
        layer_types=layer_types,
        window=window,
        variant=_variant(family, said, rope, layer_types, window_base if window else 0.0),
        dtype=_dtype(values, where),
        quantised=quantised,
        further_layers=next((said[name] for name in family.further_layers if said[name] is not None), 0),
        warnings=(*values.warnings, *rope.warnings, *_on_quantised(quantised, where)),
    )


def _quantised(family: Family, said: Mapping[str, Any], where: str) -> str | None:
    """The kind of quantised weights that a folder says it has."""
    fields = said.get("quantization_config")
    if not fields:
        return None
    method, block = fields.get("quant_method"), fields.get("weight_block_size")
    if method != family.quantised or block != ([FP8_BLOCK] * 2 if method == "fp8" else None):
        raise ModelError(
            f"{where} has quantization_config with quant_method {method!r} and weight_block_size {block!r}, but "
            f"quantised weights are read as {family.quantised} only, FP8 in blocks of {FP8_BLOCK}; use the folder that "
            "they were made from."
        )
    return family.quantised


def _on_quantised(kind: str | None, where: str) -> list[str]:
    return [f"{where} says that weights are in {kind}; they are trained, and exported, as bfloat16."] if kind else []


def _layers(family: Family, said: Mapping[str, Any], where: str) -> tuple[int, Hybrid]:
    """The number of layers, and recurrent ones among them."""
    try:
        hybrid = family.hybrid(said)
    except ModelError as error:
        raise ModelError(f"In {where} {error}") from None
    layers = len(hybrid.pattern) or said["num_hidden_layers"]
    for problem in hybrid.problems(layers):
        raise ModelError(f"In {where} the layers cannot work: their {problem}")
    return layers, replace(hybrid, pattern=shortest(hybrid.pattern))


def _experts(family: Family, said: Mapping[str, Any], layers: int, where: str) -> Experts:
    """The experts of a family's layers; none in dense ones."""
    try:
        experts = family.experts(said)
    except ModelError as error:
        raise ModelError(f"In {where} {error}") from None
    for problem in experts.problems(layers):
        raise ModelError(f"In {where} the experts cannot work: their {problem}")
    return experts


def _latent(family: Family, said: Mapping[str, Any], rope: Rope, where: str) -> Latent:
    """The latent attention of a family's layers; none in others."""
    try:
        latent = family.latent(said)
    except ModelError as error:
        raise ModelError(f"In {where} {error}") from None
    if not latent.kv_rank:
        return latent
    for problem in latent.problems():
        raise ModelError(f"In {where} latent attention cannot work: its {problem}")
    if not rope.scaling.truncate:
        raise ModelError(f"{where} has truncate false for rotary positions, which latent attention does not know here.")
    if wrong := latent.scaling_problem(rope.scaling):
        raise ModelError(f"In the scaling of rotary positions of {where} {wrong}")
    return replace(latent, score_magnitude=rope.score_magnitude)


def _variant(
    family: Family, said: Mapping[str, Any], rope: Rope, layer_types: list[LayerType], window_base: float
) -> Variant:
    """The differences of layers from LLaMA's, by what was read of them."""
    variant = family.variant(said)
    unrotated = variant.unrotated_layers
    if family.turns_windows_only and said["sliding_window"] is not None:
        types = layer_types if len(layer_types) > 1 else layer_types * said["num_hidden_layers"]
        unrotated = [number for number, kind in enumerate(types) if kind == "full"]
    return replace(
        variant,
        window_rope_base=window_base,
        unrotated_layers=unrotated,
        rotary_percent=rope.percent,
        query_beta=rope.query_beta,
        query_length=rope.query_length,
    )


def _dtype(values: Values, where: str) -> str | None:
    """The weights' type; without the prefix that old versions wrote."""
    given = values.read["dtype"] or values.read["torch_dtype"]
    dtype = None if given is None else str(given).removeprefix("torch.")
    if dtype not in (None, *_DTYPES):
        raise ModelError(f"{where} has dtype {given!r}; it must be one of {', '.join(_DTYPES)}.")
    return dtype


def _rotated(head_dim: int, rope: Rope, where: str) -> int:
    """Dimensions of a head that positions turn."""
    rotated = int(head_dim * rope.percent) if 0 < rope.percent <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise ModelError(
            f"{where} has partial_rotary_factor {rope.percent:g}, so positions turn {rotated} of a head's {head_dim} "
            "elements; it must be an even number, at least 2."
        )
    if problem := rope.scaling.frequencies_problem(rotated):
        raise ModelError(f"In the scaling of rotary positions of {where} {problem}")
    return rotated


def _head_dim(given: int | None, hidden: int, heads: int, where: str) -> int:
    if given is None and hidden % heads:
        raise ModelError(f"{where} has hidden_size {hidden}, which {heads} heads do not divide, and no head_dim.")
    head_dim = hidden // heads if given is None else given
    if why := unserved(head_dim):
        raise ModelError(f"{where} has heads of {why}.")
    return head_dim
