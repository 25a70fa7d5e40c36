"""Rotary positions as a config.json has them: rope_parameters of version 5, or rope_theta and rope_scaling before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from distca.errors import ModelError
from distca.models.families.family import Family, WindowRope
from distca.models.fields import OFF, REQUIRED, Field, Inert, Only, Read, read_fields, shown
from distca.models.rope import RopeScaling, yarn_magnitude

FULL_LAYERS, WINDOW_LAYERS = "full_attention", "sliding_attention"
_OF_LONGROPE = Inert("Only longrope reads it.")

_FIELDS: Final[dict[str, Field]] = {
    "rope_type": Read("text", None),
    "type": Read("text", None),
    "rope_theta": Read("number", None),
    "factor": Read("number", None, optional=True),
    "original_max_position_embeddings": Read("count", None),
    "low_freq_factor": Read("number", None),
    "high_freq_factor": Read("number", None),
    "beta_fast": Read("number", None, optional=True),
    "beta_slow": Read("number", None, optional=True),
    "attention_factor": Read("number", None, optional=True),
    "mscale": Read("number", None, optional=True),
    "mscale_all_dim": Read("number", None, optional=True),
    "truncate": Read("switch", True),
    "llama_4_scaling_beta": Only((None,), "queries of this model type are not scaled by their position"),
    "max_position_embeddings": Inert("The field of this name beside is read."),
    "mrope_section": Only(OFF, "positions of images are not served"),
    "alpha": Only(OFF, "scaling by a fixed alpha is not served"),
    "short_factor": _OF_LONGROPE,
    "long_factor": _OF_LONGROPE,
    "finetuned": Inert("It says how the model was made."),
}
_OF_WINDOWS: Final[dict[str, Field]] = {
    "rope_type": Only(("default", None), "nothing stretches positions in layers with windows here"),
    "type": Only((None,), "nothing stretches positions in layers with windows here"),
    "rope_theta": Read("number", None),
}


@dataclass(frozen=True)
class Rope:
    """The rotary positions that a config.json describes.

    Attributes:
        base: of the frequencies.
        scaling: how they are stretched; its original_length is always set.
        warnings: sentences on what is left out.
        percent: the part of each head that positions turn.
        alpha: by which documents are longer whatever their length, so that the base is larger; None where it is not.
        query_beta: how much queries grow with their position; 0 where they do not.
        query_length: the positions within which they stay.
        score_magnitude: weight of YaRN's magnitude on the scores of latent attention; 0 for none.
    """

    base: float
    scaling: RopeScaling
    warnings: tuple[str, ...]
    percent: float = 1.0
    alpha: float | None = None
    query_beta: float = 0.0
    query_length: int = 0
    score_magnitude: float = 0.0


def field_of_rope(config: Mapping[str, Any]) -> str:
    """The name of the field that holds the scaling."""
    return "rope_parameters" if config.get("rope_parameters") else "rope_scaling"


def split_rope(config: Mapping[str, Any], family: WindowRope, where: str) -> tuple[Mapping[str, Any], float]:
    """The fields as they would be of the layers without windows alone, and the base in those with windows.

    Args:
        config: the fields of the model, or of its text part.
        family: what its layers with windows have.
        where: name of the file, for messages.

    Raises:
        ModelError: a field is of another type, or not served.
    """
    parts = config.get("rope_parameters") or {}
    for name, part in parts.items():
        if name not in (FULL_LAYERS, WINDOW_LAYERS):
            raise ModelError(
                f"{where} has {name} in rope_parameters, where only {FULL_LAYERS} and {WINDOW_LAYERS} are read."
            )
        if part is not None and not isinstance(part, dict):
            raise ModelError(f"{where} has {shown(name, part)} in rope_parameters; it must be an object with fields.")
    full, window = (parts.get(name) or {} for name in (FULL_LAYERS, WINDOW_LAYERS))
    said = read_fields(
        window, _OF_WINDOWS, f"{WINDOW_LAYERS} in rope_parameters of {where}", "a layer with a window"
    ).read
    old = config.get(family.field) if family.field else None
    base = next(each for each in (said["rope_theta"], old, family.default) if each is not None)
    if base <= 1:
        raise ModelError(f"{where} has rotary positions of base {base:g} in layers with windows; it must be above 1.")
    for name, fields in (("rope_parameters", full), ("rope_scaling", config.get("rope_scaling") or {})):
        if "type" in fields:
            raise ModelError(f"{where} has type in {name}, of which transformers reads rope_type only; rename it.")
        if fields.get("truncate", True) is not True:
            raise ModelError(
                f"{where} has truncate in {name}, which transformers reads of no kind of layer; remove it."
            )
    return {**config, "rope_parameters": full}, float(base)


def read_rope(config: Mapping[str, Any], positions: int, family: Family, where: str) -> Rope:
    """Returns the rotary positions that the fields of a config.json describe.

    Args:
        config: the fields of the model, or of its text part.
        positions: max_position_embeddings.
        family: what its class does.
        where: name of the file, for messages.

    Raises:
        ModelError: a field is of another type, or not served.
    """
    name = field_of_rope(config)
    fields = config.get(name) or {}
    if not fields and config.get("rope_parameters") is None:
        fields = family.rope_default
    if any(isinstance(value, dict) for value in fields.values()):
        raise ModelError(f"{where} has {name} by kind of layer, but all layers turn alike here.")
    values = read_fields(fields, _FIELDS | _own_fields(family), f"{name} of {where}", "a scaling")
    default_base, kinds = family.rope_base, family.rope_kinds
    _refuse_two(config, default_base, where)
    said = values.read
    base = next(each for each in (said["rope_theta"], config.get("rope_theta"), default_base) if each is not None)
    if base <= 1:
        raise ModelError(f"{where} has rope_theta {base:g}; it must be above 1.")
    kind = "default" if (given := said["rope_type"] or said["type"]) is None else given
    alpha = said.get("alpha") if family.alpha else None
    if alpha is not None:
        if kind != "dynamic":
            raise ModelError(f"{where} has alpha in {name}, which is read with dynamic scaling only; remove it.")
        kind = "default"
    if kind not in kinds:
        served = [each for each in kinds if each != "default"]
        but = f"served are {_listed(served)}" if served else "this model type is served without scaling only"
        raise ModelError(f"{where} has {kind!r} in {name}, but {but}.")
    field = family.fields.get("original_max_position_embeddings")
    outside = config.get("original_max_position_embeddings", field.default if isinstance(field, Read) else None)
    try:
        scaling = _scaling(said, kind, outside, positions)
    except KeyError as missing:
        raise ModelError(f"{where} has no {missing.args[0]} in {name}, without which {kind} is unknown.") from None
    for problem in scaling.problems():
        raise ModelError(f"In {name} of {where} {problem}")
    beta, length = 0.0, 0
    if family.scales_queries:
        beta, length = said["llama_4_scaling_beta"], said["original_max_position_embeddings"]
    percent = family.rotary_percent
    if percent is None:
        percent = next(
            each
            for each in (said["partial_rotary_factor"], config.get("partial_rotary_factor"), family.rotary_default)
            if each is not None
        )
    magnitude = (said["mscale_all_dim"] or 0.0) if scaling.kind == "yarn" else 0.0
    return Rope(float(base), scaling, values.warnings, float(percent), alpha, beta, length, magnitude)


def _own_fields(family: Family) -> dict[str, Field]:
    """The fields that a family's class reads in its own way."""
    part, scales = family.rotary_percent, family.scales_queries
    served: dict[str, Field] = {
        "partial_rotary_factor": Read("number", None, optional=True)
        if part is None
        else Only((None, part), f"rotary positions turn {part:g} of a head here")
    }
    if family.alpha:
        served["alpha"] = Read("number", None, optional=True)
    if "longrope" in family.rope_kinds:
        served |= {name: Read("numbers", None, optional=True) for name in ("short_factor", "long_factor")}
    if family.image_positions:
        served |= dict.fromkeys(("mrope_section", "mrope_interleaved"), Inert("Texts have one position a token."))
    if scales:
        served |= {"llama_4_scaling_beta": Read("number"), "original_max_position_embeddings": Read("count")}
    return served


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _refuse_two(config: Mapping[str, Any], default_base: float, where: str) -> None:
    """Refuse both fields: transformers takes rope_scaling alone then, and with it another base."""
    first, second = config.get("rope_parameters"), config.get("rope_scaling")
    if first and second and first != second:
        raise ModelError(
            f"{where} has rope_parameters and rope_scaling, of which transformers takes the second, with the base "
            f"{config.get('rope_theta', default_base):g} instead of the first one's; put the scaling and its "
            "rope_theta together into rope_parameters, and leave out rope_scaling."
        )


def _scaling(said: Mapping[str, Any], kind: str, outside: int | None, positions: int) -> RopeScaling:
    """The scaling of a kind; KeyError names a field that it needs."""
    if kind == "default":
        return RopeScaling(original_length=positions)
    # transformers takes the field beside the others first, and for dynamic the context of the model itself.
    original = outside or said["original_max_position_embeddings"]
    original = positions if kind in ("dynamic", "linear") or original is None else original
    inferred = positions / original if kind in ("yarn", "longrope") and said["factor"] is None else None
    factor = _needed(said, "factor", inferred)
    return RopeScaling(
        kind=kind,  # type: ignore[arg-type]  # one of those that the family has
        factor=factor,
        original_length=original,
        low_freq_factor=_needed(said, "low_freq_factor", REQUIRED if kind == "llama3" else 1.0),
        high_freq_factor=_needed(said, "high_freq_factor", REQUIRED if kind == "llama3" else 4.0),
        beta_fast=said["beta_fast"] or 32.0,
        beta_slow=said["beta_slow"] or 1.0,
        attention_factor=said["attention_factor"] if kind == "longrope" else _attention_factor(said, factor),
        truncate=said["truncate"],
        **_factors(said, kind),
    )


def _factors(said: Mapping[str, Any], kind: str) -> dict[str, list[float]]:
    """Returns longrope's factors for each frequency."""
    if kind != "longrope":
        return {}
    for name in ("short_factor", "long_factor"):
        if said[name] is None:
            raise KeyError(name)
    return {f"{part}_factors": list(map(float, said[f"{part}_factor"])) for part in ("short", "long")}


def _needed(said: Mapping[str, Any], name: str, default: Any) -> float:
    value = said[name] if said[name] is not None else default
    if value is None or value is REQUIRED:
        raise KeyError(name)
    return float(value)


def _attention_factor(said: Mapping[str, Any], factor: float) -> float | None:
    """YaRN's, where it is given or follows from two magnitudes."""
    if said["attention_factor"] is not None:
        return float(said["attention_factor"])
    own, all_dimensions = said["mscale"], said["mscale_all_dim"]
    if not own or not all_dimensions:
        return None
    return yarn_magnitude(factor, own) / yarn_magnitude(factor, all_dimensions)
