"""Checkpoints of parity's cases, saved and loaded by different numbers of tensor-parallel ranks and stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

CPU = torch.device("cpu")


def loaded_from_checkpoints(cases: list[Any], path: Path) -> list[float]:
    """By case, the largest difference of weights that two tensor-parallel ranks or stages saved, loaded by one."""
    from megatron.core import dist_checkpointing

    from distca.parity import disaggregated, unmodified
    from megatron_patches.checkpoint.whole_weights import save_weights

    whole, differences = [], []
    for case in cases:
        model = unmodified.unmodified_model(case, torch.float32)
        whole.append({name: p.detach() for name, p in model.named_parameters()})
    for number, (case, weights) in enumerate(zip(cases, whole, strict=True)):
        folder = path / str(number)
        folder.mkdir(exist_ok=True)
        _, saved = disaggregated.attached(case, torch.float32, CPU, "reference", weights)
        save_weights(saved, folder)
    for number, (case, weights) in enumerate(zip(cases, whole, strict=True)):
        zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        alone = replace(case, tp=1, pp=1, pattern=case.pattern.replace("|", ""))
        _, loaded = disaggregated.attached(alone, torch.float32, CPU, "reference", zeros)
        read = dist_checkpointing.load({"model": loaded.sharded_state_dict()}, str(path / str(number)))
        loaded.load_state_dict(read["model"])
        found = dict(loaded.named_parameters())
        differences.append(max((found[name] - weight).abs().max().item() for name, weight in weights.items()))
    return differences
