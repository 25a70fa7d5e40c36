"""How rows were spread over experts in a step, as figures of its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

if TYPE_CHECKING:
    from megatron_patches.experts.balance import LayerLoad

_DECIMALS = 2
"""Decimals of a load in metrics.jsonl, where a step has one for every expert of every layer."""


def expert_values(loads: Mapping[int, LayerLoad]) -> dict[str, float | list[float]]:
    """The figures of all stages' layers; every rank calls it, and those of a stage with the same loads.

    Args:
        loads: by number of the layer from 1, from :meth:`CAD.expert_loads`; of this stage.

    Returns:
        ``expert_load_layer_N``, of every expert its rows over the mean, and of the most loaded one
        ``expert_load_max_layer_N``; ``router_entropy_layer_N``; over all layers ``expert_load_max``,
        ``experts_without_rows`` and ``router_entropy``. Empty in models without experts.
    """
    mine = _on_host(loads)
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = [mine]
    if group.size() > 1:
        stages = [{} for _ in range(group.size())]
        dist.all_gather_object(stages, mine, group=group)
    return _figures({number: layer for stage in stages for number, layer in stage.items()})


def _on_host(loads: Mapping[int, LayerLoad]) -> dict[int, tuple[np.ndarray, float]]:
    """Rows of every expert and the entropy, by number of the layer; fetched from the device all at once."""
    if not loads:
        return {}
    table = torch.stack([torch.cat((load.rows_E, load.entropy[None])) for load in loads.values()])
    rows = table.cpu().double().numpy()
    return {number: (row[:-1], float(row[-1])) for number, row in zip(loads, rows, strict=True)}


def _figures(layers: Mapping[int, tuple[np.ndarray, float]]) -> dict[str, float | list[float]]:
    """``layers``: by number, rows of every expert and the entropy."""
    if not layers:
        return {}
    values: dict[str, float | list[float]] = {}
    most, without = [], 0
    for number, (rows_E, entropy) in sorted(layers.items()):
        load_E = rows_E / max(rows_E.mean(), 1e-9)
        most.append(float(load_E.max()))
        without += int((rows_E == 0).sum())
        values |= {
            f"expert_load_layer_{number}": np.round(load_E, _DECIMALS).tolist(),
            f"expert_load_max_layer_{number}": most[-1],
            f"router_entropy_layer_{number}": entropy,
        }
    mean = float(np.mean([entropy for _, entropy in layers.values()]))
    return {"expert_load_max": max(most), "experts_without_rows": without, "router_entropy": mean} | values
