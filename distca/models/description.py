"""What the config.json of a Hugging Face folder describes, or why it is not served; needs no torch and no package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distca.errors import ModelError, system_words
from distca.models.rope import RopeScaling, yarn_magnitude
from distca.plan.head_dims import unserved

CONFIG = "config.json"


@dataclass(frozen=True)
class _Family:
    """A model type.

    Attributes:
        architecture: its class with the output layer.
        positions: max_position_embeddings where config.json has none.
        own_heads: key and value heads may be missing, and are then the query heads.
        head_dim: where config.json has none; 0 is hidden / heads.
        qkv_bias: projections of q, k and v have a bias.
        qk_norm: query and key heads are normed.
        window_unless_off: a sliding window counts unless use_sliding_window is false; else only if that is true.
    """

    architecture: str
    positions: int
    own_heads: bool = False
    head_dim: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    window_unless_off: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048, own_heads=True),
    "mistral": _Family("MistralForCausalLM", 4096 * 32, window_unless_off=True),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, head_dim=128, qk_norm=True),
}

# What transformers takes where a field is missing.
_WINDOW, _WINDOW_LAYERS, _BASE = 4096, 28, 10000.0


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A dense decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Attributes:
        family: llama, mistral, qwen2 or qwen3.
        layers: transformer layers.
        hidden: width of the residual stream.
        ffn: width inside the MLP.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocabulary: rows of the embedding.
        rope_base: base of the rotary frequencies.
        rope_scaling: how they are stretched; its original_length is always set.
        norm_epsilon: epsilon of RMSNorm.
        tie_embeddings: the output layer's weights are the embedding's.
        qkv_bias: the projections of q, k and v have a bias.
        qk_norm: query and key heads are normed before the rotation.
        positions: max_position_embeddings.
        dtype: of the weights, as config.json has it; None where it does not say.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_base: float
    rope_scaling: RopeScaling
    norm_epsilon: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    positions: int
    dtype: str | None = None


def architecture(family: str) -> str:
    """The class of a family's models in transformers."""
    return _FAMILIES[family].architecture


def family_of(qkv_bias: bool, qk_norm: bool) -> str | None:
    """The family whose layers have these and no more; None where there is none."""
    return {(False, False): "llama", (True, False): "qwen2", (False, True): "qwen3"}.get((qkv_bias, qk_norm))


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, as it is.

    Raises:
        ModelError: there is none, or it is no JSON object.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; a folder with {CONFIG} and safetensors files is needed.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({system_words(error)}); a model's folder has one.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not the fields of a model.")
    return content


def describe_folder(folder: Path) -> ModelDescription:
    """What model a folder holds.

    Raises:
        ModelError: a field is missing, or what it asks for is not served.
    """
    return describe(read_config(folder), str(folder / CONFIG))


def describe(config: Mapping[str, Any], where: str) -> ModelDescription:
    """What model the fields of a config.json are of.

    Args:
        config: its content.
        where: its name, for messages.

    Raises:
        ModelError: a field is missing, or what it asks for is not served.
    """
    return _Reader(config, where).describe()


class _Reader:
    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def describe(self) -> ModelDescription:
        family = self._family()
        self._refuse_unserved()
        heads, hidden, layers = (
            self._count(name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
        )
        self._refuse_windows(family, layers)
        kv_heads = heads if family.own_heads and self._given("num_key_value_heads") is None else None
        head_dim = self._head_dim(family, hidden, heads)
        positions = self._count("max_position_embeddings", family.positions)
        base, scaling = self._rope(positions)
        description = ModelDescription(
            family=self._config["model_type"],
            layers=layers,
            hidden=hidden,
            ffn=self._count("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads or self._count("num_key_value_heads"),
            head_dim=head_dim,
            vocabulary=self._count("vocab_size"),
            rope_base=base,
            rope_scaling=scaling,
            norm_epsilon=self._number(self._config, "rms_norm_eps"),
            tie_embeddings=bool(self._given("tie_word_embeddings")),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            positions=positions,
            dtype=self._given("dtype") or self._given("torch_dtype"),
        )
        if heads % description.kv_heads:
            raise self._error(
                f"has {heads} query heads, which {description.kv_heads} key and value heads do not divide"
            )
        return description

    def _error(self, said: str) -> ModelError:
        return ModelError(f"{self._where} {said}.")

    def _given(self, name: str) -> Any:
        return self._config.get(name)

    def _family(self) -> _Family:
        if self._given("auto_map"):
            raise self._error("has auto_map, code that comes with the weights, which is never run; use a model without")
        kind, served = self._given("model_type"), ", ".join(_FAMILIES)
        if kind not in _FAMILIES:
            raise self._error(f"has model_type {kind!r}, but served are {served}")
        family = _FAMILIES[kind]
        for name in self._given("architectures") or ():
            if name != family.architecture:
                raise self._error(f"has the architecture {name}, but of {kind} only {family.architecture} is served")
        return family

    def _refuse_unserved(self) -> None:
        if self._given("quantization_config"):
            raise self._error(
                "has quantization_config, but quantised weights cannot be trained; use the folder they were made from"
            )
        for name in ("num_local_experts", "num_experts", "n_routed_experts"):
            if self._given(name):
                raise self._error(f"has {name} {self._given(name)}, but mixtures of experts are not served")
        for name in ("kv_lora_rank", "q_lora_rank"):
            if self._given(name):
                raise self._error(f"has {name} {self._given(name)}, but multi-head latent attention is not served")
        activation = self._config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise self._error(f"has hidden_act {activation!r}, but only silu is served")
        for name in ("attention_bias", "mlp_bias"):
            if self._given(name):
                raise self._error(f"has {name}, but of all biases only Qwen2's of q, k and v are served")
        if self._given("attention_dropout"):
            raise self._error(
                f"has attention_dropout {self._given('attention_dropout')}, but core attention has none; set it to 0"
            )
        partial = self._given("partial_rotary_factor")
        if partial not in (None, 1, 1.0):
            raise self._error(f"has partial_rotary_factor {partial}, but rotary positions turn all of a head here")

    def _refuse_windows(self, family: _Family, layers: int) -> None:
        kinds = self._given("layer_types")
        if kinds is None:
            kinds = ["full_attention"] * layers
            switch = self._config.get("use_sliding_window", family.window_unless_off)
            window = self._config.get("sliding_window", _WINDOW)
            if switch and window is not None:
                first = 0 if family.window_unless_off else self._config.get("max_window_layers", _WINDOW_LAYERS)
                if first < layers:
                    raise self._error(
                        f"has sliding_window {window}, but every token attends to its whole document here; if the "
                        "model was trained without, set it to null"
                    )
        for kind in kinds:
            if kind != "full_attention":
                raise self._error(f"has layers of {kind} in layer_types, but only full_attention is served")

    def _head_dim(self, family: _Family, hidden: int, heads: int) -> int:
        if self._given("head_dim") is not None:
            head_dim = self._count("head_dim")
        elif family.head_dim and "head_dim" not in self._config:
            head_dim = family.head_dim
        else:
            if hidden % heads:
                raise self._error(f"has hidden_size {hidden}, which {heads} heads do not divide, and no head_dim")
            head_dim = hidden // heads
        if why := unserved(head_dim):
            raise self._error(f"has heads of {why}")
        return head_dim

    def _rope(self, positions: int) -> tuple[float, RopeScaling]:
        """The base and its scaling, from version 5's rope_parameters or from rope_theta and rope_scaling before."""
        name = "rope_parameters" if self._given("rope_parameters") else "rope_scaling"
        fields = self._given(name) or {}
        if not isinstance(fields, dict):
            raise self._error(f"has {name} of type {type(fields).__name__}, which is no set of fields")
        if any(isinstance(value, dict) for value in fields.values()):
            raise self._error(f"has {name} by kind of layer, but all layers turn alike here")
        if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise self._error(
                f"has partial_rotary_factor {fields['partial_rotary_factor']} in {name}, but rotary positions turn all "
                "of a head here"
            )
        if fields.get("llama_4_scaling_beta") is not None:
            raise self._error(f"has queries scaled by their position in {name} (llama_4_scaling_beta), not served")
        holder = fields if fields.get("rope_theta") is not None else self._config
        base = self._number(holder, "rope_theta", _BASE)
        return base, self._scaling(fields, name, positions)

    def _scaling(self, fields: Mapping[str, Any], name: str, positions: int) -> RopeScaling:
        kind = fields.get("rope_type", fields.get("type", "default"))
        if kind in ("default", None):
            return RopeScaling(original_length=positions)
        if kind not in ("linear", "dynamic", "llama3", "yarn"):
            raise self._error(f"has {kind!r} in {name}, but served are linear, dynamic, llama3 and yarn")
        # transformers takes the field beside the others first, and for dynamic the context of the model itself.
        original = self._given("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
        original = positions if kind in ("dynamic", "linear") or original is None else int(original)
        inferred = positions / original if kind == "yarn" and fields.get("factor") is None else None
        scaling = RopeScaling(
            kind=kind,
            factor=self._number(fields, "factor", inferred),
            original_length=original,
            low_freq_factor=self._number(fields, "low_freq_factor", None if kind == "llama3" else 1.0),
            high_freq_factor=self._number(fields, "high_freq_factor", None if kind == "llama3" else 4.0),
            beta_fast=float(fields.get("beta_fast") or 32.0),
            beta_slow=float(fields.get("beta_slow") or 1.0),
            attention_factor=_attention_factor(fields, inferred),
            truncate=bool(fields.get("truncate", True)),
        )
        for problem in scaling.problems():
            raise ModelError(f"In {name} of {self._where} {problem}")
        return scaling

    def _count(self, name: str, default: int | None = None) -> int:
        value = self._config.get(name)
        value = default if value is None else value
        if value is None:
            raise self._error(f"has no {name}, without which the model's shape is unknown")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(f"has {name} {value!r}; it must be a whole number of at least 1")
        return value

    def _number(self, fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
        value = fields.get(name)
        value = default if value is None else value
        if value is None:
            raise self._error(f"has no {name}, without which the model cannot be computed")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._error(f"has {name} {value!r}; it must be a number above 0")
        return float(value)


def _attention_factor(fields: Mapping[str, Any], inferred: float | None) -> float | None:
    """YaRN's, where it is given or follows from two magnitudes."""
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])
    own, all_dimensions = fields.get("mscale"), fields.get("mscale_all_dim")
    if not own or not all_dimensions:
        return None
    factor = inferred or float(fields["factor"])
    return yarn_magnitude(factor, own) / yarn_magnitude(factor, all_dimensions)
