"""placeholder until the real checks are merged"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from distca.errors import SupportError


def check_groups() -> None:
    """Raises SupportError before Megatron's process groups are there."""
    if not parallel_state.model_parallel_is_initialized():
        raise SupportError(
            "Megatron's process groups are not there yet; call distca.join_world() and "
            "parallel_state.initialize_model_parallel(...) before CAD(...)."
        )


def check_config(config: Any) -> None: ...
def check_model(model: Any) -> None: ...
def check_layer_spec(spec: Any) -> None: ...
