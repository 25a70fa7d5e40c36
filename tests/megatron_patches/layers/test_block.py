"""Nano-batches in the block's forward."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches.layers import block
from megatron_patches.layers.rotations import RowRotations
from megatron_patches.steps.batch_context import gather_nano_rows


@pytest.mark.parametrize("nano_rows", [[6], [4, 2]])
def test_a_single_nano_batch_is_not_copied(monkeypatch: pytest.MonkeyPatch, nano_rows: list[int]) -> None:
    given: list[torch.Tensor] = []

    def run(_: Any, hidden: list[torch.Tensor], *others: Any) -> list[torch.Tensor]:
        given.extend(hidden)
        return list(hidden)

    monkeypatch.setattr(block, "run_layers", run)
    stack = SimpleNamespace(
        config=SimpleNamespace(pipeline_model_parallel_size=1),
        pre_process=True,
        layers=[],
        pool=None,
        recompute_segments=False,
        in_phases=False,
        last_norm=None,
    )
    micro_batch = SimpleNamespace(nano_rows=nano_rows, chunks=1, routes=(), balance=None)
    hidden = torch.randn(6, 1, 3, requires_grad=True)
    output = block.DisaggregatedForward.forward(stack, hidden, micro_batch, RowRotations((), {}))
    assert [len(each) for each in given] == nano_rows
    assert torch.equal(output, hidden)
    assert (output is given[0] is hidden) == (len(nano_rows) == 1)


@pytest.mark.parametrize("chunks", [1, 3])
def test_neither_are_the_rotations_of_its_rows(chunks: int) -> None:
    angles = torch.randn(6, 2)
    (found,) = gather_nano_rows(angles, [6], chunks)
    assert found is angles
