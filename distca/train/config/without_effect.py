"""Settings that a run has, but that do nothing in it: said, not refused, because runs are compared by one setting."""

from __future__ import annotations

from distca.train.config.cli import by_setting
from distca.train.config.schema import RunConfig

_DISAGGREGATED_ONLY = ("transport", "ping_pong", "backward", "tolerance", "ranks_per_node", "nvshmem_buffer_gb")
"""Below cad. Kernel and deterministic count at home too, cost_table in the balance that is recorded."""


def without_effect(config: RunConfig) -> str | None:
    """Returns a sentence on the settings below cad that differ from their defaults and do nothing; None
    where none do."""
    if config.cad.enabled:
        return None
    given, usual = by_setting(config), by_setting(RunConfig())
    names = [f"cad.{name}" for name in _DISAGGREGATED_ONLY]
    changed = [f"{name} {str(given[name]).lower()}" for name in names if given[name] != usual[name]]
    return f"Without effect, because cad.enabled is false: {', '.join(changed)}" if changed else None
