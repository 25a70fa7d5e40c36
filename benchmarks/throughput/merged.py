"""A peer's start adds its mode to the benchmark.json that the other modes' start wrote."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from benchmarks.throughput.settings import Settings
from distca.errors import ConfigError

_ALIKE = (
    "hardware",
    "device",
    "warm_up",
    "batches",
    "link_channels",
    "socket_nodes",
    "model",
    "parallel",
    "tokens_per_rank",
    "micro_batches",
    "recompute",
    "fp8",
)
"""The facts that two starts must agree on, so that their figures can be compared."""


def read_first_start(settings: Settings, own: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """The report in the output folder; None where there is none. Every rank calls it together, as only the first one's
    machine has the folder.

    Args:
        settings: of this start.
        own: the report that it would begin with.
        rank: of this process.

    Raises:
        ConfigError: the report is of a run with other settings.
    """
    path = settings.output / "benchmark.json"
    found = [path.read_text(encoding="utf-8") if rank == 0 and path.is_file() else None]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return None
    report: dict[str, Any] = json.loads(found[0])
    mine = json.loads(json.dumps(own))
    apart = [name for name in _ALIKE if report.get(name) != mine[name]]
    if apart:
        raise ConfigError(
            f"{path} is of a run with another {', another '.join(apart)}; give this start the settings of that one, or "
            "another --output."
        )
    return report
