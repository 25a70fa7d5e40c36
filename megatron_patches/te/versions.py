"""The differences between the versions of Transformer Engine that are served, as its sources of 2.11 and 2.20 have
them."""

from __future__ import annotations

from typing import Any


def autocast_arguments(manager: Any) -> dict[str, tuple[Any, Any]]:
    """Returns by key the recipe and the group with which scales of delayed scaling are updated.

    Args:
        manager: FP8GlobalStateManager. In 2.11 it holds them itself; in 2.20 they are in a state that a reset replaces.
    """
    held: dict[str, tuple[Any, Any]] = getattr(manager, "quantization_state", manager).autocast_arguments
    return held
