"""The differences between the versions of Transformer Engine that are served, read from its sources of
2.11 and 2.20."""

from __future__ import annotations

from typing import Any


def autocast_arguments(manager: Any) -> dict[str, tuple[Any, Any]]:
    """Recipe and group by key, from which scales of delayed scaling are updated.

    Args:
        manager: FP8GlobalStateManager. 2.11 holds them itself; 2.20 holds them in a state that a reset replaces.
    """
    held: dict[str, tuple[Any, Any]] = getattr(manager, "quantization_state", manager).autocast_arguments
    return held
