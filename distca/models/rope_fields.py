"""Rotary positions as a config.json has them: rope_parameters of version 5, or rope_theta and rope_scaling before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from distca.errors import ModelError
from distca.models.fields import OFF, REQUIRED, Field, Inert, Only, Read, read_fields
from distca.models.rope import RopeScaling, yarn_magnitude

_DEFAULT_BASE = 10000.0
_OF_LONGROPE = Inert("Only longrope reads it, which is not served.")

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
    "partial_rotary_factor": Only((None, 1), "rotary positions turn all of a head here"),
    "llama_4_scaling_beta": Only((None,), "queries scaled by their position are not served"),
    "mrope_section": Only(OFF, "positions of images are not served"),
    "alpha": Only(OFF, "scaling by a fixed alpha is not served"),
    "short_factor": _OF_LONGROPE,
    "long_factor": _OF_LONGROPE,
    "finetuned": Inert("It says how the model was made."),
}


@dataclass(frozen=True)
class Rope:
    """What is said of rotary positions.

    Attributes:
        base: of the frequencies.
        scaling: how they are stretched; its original_length is always set.
        warnings: sentences on what is left out.
    """

    base: float
    scaling: RopeScaling
    warnings: tuple[str, ...]


def field_of_rope(config: Mapping[str, Any]) -> str:
    """The name of the field that holds the scaling."""
    return "rope_parameters" if config.get("rope_parameters") else "rope_scaling"


def read_rope(config: Mapping[str, Any], positions: int, kinds: Sequence[str], where: str) -> Rope:
    """What the fields of a config.json say of rotary positions.

    Args:
        config: the fields of the model, or of its text part.
        positions: max_position_embeddings.
        kinds: of scaling, that the family has.
        where: name of the file, for messages.

    Raises:
        ModelError: a field is of another type, or not served.
    """
    name = field_of_rope(config)
    fields = config.get(name) or {}
    if any(isinstance(value, dict) for value in fields.values()):
        raise ModelError(f"{where} has {name} by kind of layer, but all layers turn alike here.")
    values = read_fields(fields, _FIELDS, f"{name} of {where}", "a scaling")
    _refuse_two(config, where)
    said = values.read
    base = next(each for each in (said["rope_theta"], config.get("rope_theta"), _DEFAULT_BASE) if each is not None)
    if base <= 1:
        raise ModelError(f"{where} has rope_theta {base:g}; it must be above 1.")
    kind = "default" if (given := said["rope_type"] or said["type"]) is None else given
    if kind not in kinds:
        served = [each for each in kinds if each != "default"]
        but = f"served are {_listed(served)}" if served else "this model type is served without scaling only"
        raise ModelError(f"{where} has {kind!r} in {name}, but {but}.")
    outside = config.get("original_max_position_embeddings")
    try:
        scaling = _scaling(said, kind, outside, positions)
    except KeyError as missing:
        raise ModelError(f"{where} has no {missing.args[0]} in {name}, without which {kind} is unknown.") from None
    for problem in scaling.problems():
        raise ModelError(f"In {name} of {where} {problem}")
    return Rope(float(base), scaling, values.warnings)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _refuse_two(config: Mapping[str, Any], where: str) -> None:
    """Refuse both fields: transformers takes rope_scaling alone then, and with it another base."""
    first, second = config.get("rope_parameters"), config.get("rope_scaling")
    if first and second and first != second:
        raise ModelError(
            f"{where} has rope_parameters and rope_scaling, of which transformers takes the second, with the base "
            f"{config.get('rope_theta', _DEFAULT_BASE):g} instead of the first one's; put the scaling and its "
            "rope_theta together into rope_parameters, and leave out rope_scaling."
        )


def _scaling(said: Mapping[str, Any], kind: str, outside: int | None, positions: int) -> RopeScaling:
    """The scaling of a kind; KeyError names a field that it needs."""
    if kind == "default":
        return RopeScaling(original_length=positions)
    # transformers takes the field beside the others first, and for dynamic the context of the model itself.
    original = outside or said["original_max_position_embeddings"]
    original = positions if kind in ("dynamic", "linear") or original is None else original
    inferred = positions / original if kind == "yarn" and said["factor"] is None else None
    factor = _needed(said, "factor", inferred)
    return RopeScaling(
        kind=kind,  # type: ignore[arg-type]  # one of those that the family has
        factor=factor,
        original_length=original,
        low_freq_factor=_needed(said, "low_freq_factor", REQUIRED if kind == "llama3" else 1.0),
        high_freq_factor=_needed(said, "high_freq_factor", REQUIRED if kind == "llama3" else 4.0),
        beta_fast=said["beta_fast"] or 32.0,
        beta_slow=said["beta_slow"] or 1.0,
        attention_factor=_attention_factor(said, factor),
        truncate=said["truncate"],
    )


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
