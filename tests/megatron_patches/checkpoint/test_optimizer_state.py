"""Every rank saves and loads its own part of the optimizer's state, in megatron's format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint

from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from tests.train.small_runs import StepByStep, arguments, write_texts

pytestmark = [pytest.mark.slow, pytest.mark.megatron]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_a_range_of_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    from megatron_patches.checkpoint.optimizer_state import boxes

    elements = math.prod(shape)
    start = data.draw(st.integers(0, elements))
    stop = data.draw(st.integers(0, elements))
    numbers = torch.arange(elements).view(shape)
    found = list(boxes(start, stop, tuple(shape)))
    parts = [
        numbers[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].flatten()
        for offsets, sizes in found
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1


def _optimizer_states(optimizer: Any) -> list[torch.Tensor]:
    """The flat float32 weights and moments that this rank has."""
    return [
        values
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
        for group in part.optimizer.param_groups
        for weight in group["params"]
        for values in (weight.data, part.optimizer.state[weight]["exp_avg"], part.optimizer.state[weight]["exp_avg_sq"])
    ]


def _save_and_load(line: list[str], folder: Path) -> None:
    """Save as megatron does and as we do, then load both."""
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_patches.checkpoint import save_load as subject

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the state was gathered")

    run = StepByStep(parse_run_config(line))
    run.run(run.step())
    trainer = run.trainer
    trainer.optimizer.step()
    keep, gather = subject.keep_parts, DistributedOptimizer.get_parameter_state_dp_zero
    for name in ("gathered", "parts"):
        if dist.get_rank() == 0:
            (folder / name).mkdir()
        dist.barrier()
        subject.keep_parts = (lambda _: None) if name == "gathered" else keep
        DistributedOptimizer.get_parameter_state_dp_zero = gather if name == "gathered" else refuse
        subject.save_checkpoint(folder / name, trainer.model, trainer.optimizer, {"step": 1})
    states = _optimizer_states(trainer.optimizer.optimizer)
    assert sum(values.abs().sum() for values in states) > 0
    saved = [values.clone() for values in states]
    for name in ("gathered", "parts"):
        for values in states:
            values.normal_()
        subject.load_checkpoint(folder / name, trainer.model, trainer.optimizer)
        loaded = _optimizer_states(trainer.optimizer.optimizer)
        assert all(map(torch.equal, loaded, saved)), name
    run.close()


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    metadata = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.full(each.size, torch.nan, dtype=each.properties.dtype)
        for name, each in metadata.items()
        if hasattr(each, "size")
    }
    checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


@pytest.mark.parametrize(
    "ranks, cut",
    [
        (4, {"parallel__tp": 2}),
        (4, {"parallel__pp": 2, "model__tie_embeddings": True}),
        (2, {"train__precision": "bf16"}),
    ],
)
def test_nothing_is_gathered_and_the_same_is_saved(ranks: int, cut: dict[str, Any], tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    line = arguments(output=tmp_path, data__path=tmp_path / "texts", model__layers=2, train__micro_batches=2, **cut)
    run_ranks(ranks, _save_and_load, line, tmp_path, timeout=200)
    gathered, parts = (_tensors(tmp_path / name) for name in ("gathered", "parts"))
    assert set(gathered) == set(parts) and any(name.startswith("optimizer.state.exp_avg_sq.") for name in parts)
    for name, expected in gathered.items():
        assert torch.equal(parts[name], expected), name
