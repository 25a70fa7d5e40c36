"""The sliding window of a config.json, by the ways in which families say which layers have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distca.errors import ModelError
from distca.models.families.family import Family
from distca.models.fields import shown
from distca.models.shape import LayerType

_FULL, _WINDOW = "full_attention", "sliding_attention"


def read_window(family: Family, said: Mapping[str, Any], where: str) -> tuple[list[LayerType], int]:
    """Returns the type of each layer, and the number of tokens in a window.

    In layers of type "full" a token attends to its whole document up to itself. In those of type "window" it attends to
    the last tokens of this, itself included. There is one type where all layers have the same. The number is 0 where no
    layer has a window.

    Args:
        family: how it says it.
        said: the values of its fields.
        where: name of the file, for messages.

    Raises:
        ModelError: layer_types does not fit the layers, or names a kind that is not served.
    """
    windows = family.windows
    if windows == "none":
        return ["full"], 0
    window, layers = said["sliding_window"], said["num_hidden_layers"]
    kinds = said.get("layer_types")
    if windows == "every" and kinds is not None:  # with which transformers takes a Mistral for a Ministral
        _check(kinds, layers, window, where)
        kinds = None
    if windows == "switched" and not said["use_sliding_window"]:
        window = None
    if windows == "unrotated":
        return _unrotated(family, said, where)
    if windows == "periodic" and kinds is None and window is not None:
        every = said[family.full_every] if isinstance(family.full_every, str) else family.full_every
        if not isinstance(every, int) or every < 1:
            raise ModelError(
                f"{where} has {shown(str(family.full_every), every)}; it must be 1 or more, or give layer_types."
            )
        has_window = [bool((layer + 1) % every) for layer in range(layers)]
    elif kinds is None:
        first = said["max_window_layers"] if windows == "switched" else 0
        has_window = [window is not None and layer >= first for layer in range(layers)]
    else:
        _check(kinds, layers, window, where)
        has_window = [kind == _WINDOW for kind in kinds]
    if window is None or not any(has_window):
        return ["full"], 0
    return ["window"] if all(has_window) else ["window" if each else "full" for each in has_window], window


def _unrotated(family: Family, said: Mapping[str, Any], where: str) -> tuple[list[LayerType], int]:
    """The same of a family whose windows, if use_sliding_window is true, are in layers without rotary positions."""
    window, layers = said["sliding_window"] if said["use_sliding_window"] else None, said["num_hidden_layers"]
    kinds, rotated = said["layer_types"], said["no_rope_layers"]
    if rotated is not None and len(rotated) < layers:
        raise ModelError(f"{where} has no_rope_layers of {len(rotated)} layers, but num_hidden_layers is {layers}.")
    if kinds is None:
        unrotated = family.variant(said).unrotated_layers
        kinds = [_WINDOW if window is not None and layer in unrotated else _FULL for layer in range(layers)]
    _check(kinds, layers, window, where)
    if window is None or _WINDOW not in kinds:
        return ["full"], 0
    return ["window" if kind == _WINDOW else "full" for kind in kinds], window


def _check(kinds: list[str], layers: int, window: int | None, where: str) -> None:
    if len(kinds) != layers:
        raise ModelError(f"{where} has layer_types of {len(kinds)} layers, but num_hidden_layers is {layers}.")
    for kind in kinds:
        if kind not in (_FULL, _WINDOW):
            raise ModelError(f"{where} has layers of {kind} in layer_types, but only {_FULL} and {_WINDOW} are served.")
    if window is None and _WINDOW in kinds:
        raise ModelError(
            f"{where} has layers of {_WINDOW} in layer_types, but no window for them: sliding_window is not there, or "
            f"use_sliding_window is false. If the model was trained without, make them {_FULL}."
        )
