"""The sliding window of a config.json, by the ways in which families say which layers have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distca.errors import ModelError
from distca.models.families.family import Windows

_FULL, _WINDOW = "full_attention", "sliding_attention"


def read_window(windows: Windows, said: Mapping[str, Any], where: str) -> int | None:
    """Tokens that some layer attends to, itself included; None where all layers attend to whole documents.

    Args:
        windows: how the family says it.
        said: the values of its fields.
        where: name of the file, for messages.

    Raises:
        ModelError: layer_types does not fit the layers, or names a kind that is not served.
    """
    if windows == "none":
        return None
    window: int | None = said["sliding_window"]
    if windows == "every":
        if said.get("layer_types") is not None:  # with which transformers takes a Mistral for a Ministral
            _check(said["layer_types"], said["num_hidden_layers"], window, where)
        return window
    if windows == "switched" and not said["use_sliding_window"]:
        window = None
    kinds = said["layer_types"]
    if kinds is None:
        first = said["max_window_layers"] if windows == "switched" else 0
        return window if first < said["num_hidden_layers"] else None
    _check(kinds, said["num_hidden_layers"], window, where)
    return window if _WINDOW in kinds else None


def _check(kinds: list[str], layers: int, window: int | None, where: str) -> None:
    if len(kinds) != layers:
        raise ModelError(f"{where} has layer_types of {len(kinds)} layers, but num_hidden_layers is {layers}.")
    for kind in kinds:
        if kind not in (_FULL, _WINDOW):
            raise ModelError(f"{where} has layers of {kind} in layer_types, but only {_FULL} is served.")
    if window is None and _WINDOW in kinds:
        raise ModelError(
            f"{where} has layers of {_WINDOW} in layer_types, but no sliding_window for them; if the model was "
            f"trained without, make them {_FULL}."
        )
