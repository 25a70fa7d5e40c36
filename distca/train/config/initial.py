"""The settings that a Hugging Face folder brings along: the model's shape, and its tokenizer; needs no torch."""

from __future__ import annotations

from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from distca.errors import ConfigError, ModelError
from distca.models.description import ModelDescription, describe_folder, family_of, scalings
from distca.models.rope import RopeScaling
from distca.models.shape import ModelShape
from distca.models.variant import Variant
from distca.train.config.schema import ModelConfig, RunConfig

_LOSSES = tuple(f"model.experts.{name}" for name in ("balance", "document_balance", "z_loss", "bias_rate"))
_MAY_DIFFER = ("model.rope_base", "model.rope_scaling.", "data.", *_LOSSES)
"""Positions are stretched for longer contexts, data may come with a tokenizer of their own, and how experts are
balanced is a matter of training."""
_GROUPS = ("rope_scaling", "variant", "experts", "hybrid", "latent")
"""Settings of the model that have settings of their own."""


def model_config(model: ModelDescription) -> ModelConfig:
    """The shape of a described model."""
    return ModelConfig(**{name: getattr(model, name) for name in _shared()})


def settings_of_folder(config: RunConfig) -> dict[str, Any] | None:
    """Returns the settings that the folder in checkpoint.init_from gives, by dotted setting; None without a folder. A
    run that resumes has its shape in its own settings, should the folder be gone.

    Raises:
        ModelError: it holds no model that is served.
    """
    folder = config.checkpoint.init_from
    if folder is None or (config.checkpoint.resume and not Path(folder).is_dir()):
        return None
    model = describe_folder(Path(folder))
    groups = {
        f"model.{group}.{name}": value for group in _GROUPS for name, value in asdict(getattr(model, group)).items()
    }
    others = {f"model.{name}": getattr(model, name) for name in _shared() if name not in _GROUPS}
    data = {"data.tokenizer": folder} | ({"data.vocabulary": model.vocabulary} if config.data.source == "mix" else {})
    return others | groups | data


def check_same_shape(config: RunConfig, brought: dict[str, Any]) -> None:
    """Refuse settings of the model that are not those of its folder.

    Args:
        config: the run.
        brought: from :func:`settings_of_folder`.

    Raises:
        ConfigError: naming the first one.
    """
    for setting, value in brought.items():
        if setting.startswith(_MAY_DIFFER):
            continue
        given = attrgetter(setting)(config)
        if given != value:
            raise ConfigError(
                f"{setting} is {given}, but the model in checkpoint.init_from {config.checkpoint.init_from} has "
                f"{value}; leave out {setting}, or begin without checkpoint.init_from."
            )


def first_scaling(config: RunConfig) -> RopeScaling:
    """How positions were stretched before any setting said so; what the settings say where the folder is gone."""
    if config.checkpoint.init_from is None:
        return RopeScaling()
    first = _first(config)
    return config.model.rope_scaling if first is None else first.rope_scaling


def context_warning(config: RunConfig) -> str | None:
    """A sentence where the run trains positions that the model it begins with never saw, and stretches none."""
    first, model, longest = _first(config), config.model, config.data.context_length
    if first is None or model.rope_base != first.rope_base or not model.hybrid.rotate:
        return None
    known = _known_positions(first.positions, first.rope_scaling, model.rope_scaling)
    if known is None or longest <= known:
        return None
    factor = -(-longest // model.rope_scaling.original_length)  # by which yarn stretches the first training's positions
    return (
        f"data.context_length is {longest}, but the model in checkpoint.init_from {config.checkpoint.init_from} knows "
        f"{known} positions, and nothing stretches them further. Set model.rope_base to a larger base, or "
        f"model.rope_scaling.kind to yarn and model.rope_scaling.factor to {factor} or more, "
        f"or data.context_length to {known} or less."
    )


def _known_positions(positions: int, first: RopeScaling, own: RopeScaling) -> int | None:
    """Positions of the model with a scaling; None where it goes by each document's length."""
    if own.kind == "dynamic":
        return None
    if own.kind == "linear":
        return positions if own == first else round(positions * own.factor)
    if own.kind in ("yarn", "llama3"):
        stretched = round(own.original_length * own.factor)
        return max(positions, stretched) if own == first else stretched
    return positions


def description_of(config: RunConfig, vocabulary: int) -> ModelDescription:
    """Returns the description of a run's model, for its export.

    Args:
        config: a validated run.
        vocabulary: token ids of the model.

    Raises:
        ModelError: transformers has no such model.
    """
    model, scaling = config.model, config.model.rope_scaling
    first = _first(config)
    family = first.family if first is not None else family_of(model)
    if family is None:
        raise ModelError(
            "No model of transformers that is served has both model.qkv_bias and model.qk_norm, so this one cannot be "
            "exported; set one of them to false, or leave out checkpoint.export."
        )
    own = any(model.windows) or model.sinks or model.variant != Variant() or model.experts.count or model.latent.kv_rank
    if first is None and (own or model.hybrid.pattern):
        raise ModelError(
            "The model has windows, sinks, experts, latent attention, recurrent layers or a variant, and no folder of "
            "a family that has them, so it cannot be exported; begin with a folder, or leave out checkpoint.export."
        )
    if scaling.kind != "none" and scaling.kind not in scalings(family):
        raise ModelError(
            f"model.rope_scaling.kind is {scaling.kind}, which models of {family} do not have in transformers, so this "
            "one cannot be exported; set it to none, or leave out checkpoint.export."
        )
    if model.variant.window_rope_base and scaling.kind == "yarn" and not scaling.truncate:
        raise ModelError(
            "model.rope_scaling.truncate is false, which transformers does not read where layers with windows have "
            "rotary positions of their own, so this model cannot be exported; set it to true, or leave out "
            "checkpoint.export."
        )
    length = model.variant.query_length
    if length and scaling.kind in ("yarn", "llama3") and scaling.original_length != length:
        raise ModelError(
            f"model.rope_scaling.original_length is {scaling.original_length}, but queries are scaled from {length} "
            "positions on, and transformers has one number for both, so this model cannot be exported; leave out "
            "model.rope_scaling.original_length, or leave out checkpoint.export."
        )
    positions = max(config.data.context_length, first.positions if first is not None else 0)
    if scaling.kind == "yarn":
        positions = max(positions, round(scaling.original_length * scaling.factor))
    if scaling.kind == "dynamic":
        positions = scaling.original_length  # which is what this kind of scaling goes by
    values = {name: getattr(model, name) for name in _shared()}
    values |= {"vocabulary": vocabulary, "head_dim": model.resolved_head_dim}
    if first is not None:
        values |= {"fused_experts": first.fused_experts, "further_layers": first.further_layers}
    return ModelDescription(family=family, positions=positions, **values)


def _first(config: RunConfig) -> ModelDescription | None:
    folder = config.checkpoint.init_from
    return describe_folder(Path(folder)) if folder is not None and Path(folder).is_dir() else None


def _shared() -> list[str]:
    """Fields that settings and descriptions have alike."""
    return [item.name for item in fields(ModelShape)]
