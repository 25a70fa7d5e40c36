"""Nano-batches in the block's forward, and the numbers of recurrent layers in a HybridModel's timeline."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches.layers import block
from megatron_patches.layers.rotations import RowRotations
from megatron_patches.layers.units import BoundRecurrentUnit, Unit
from megatron_patches.steps.batch_context import gather_nano_rows
from megatron_patches.versions import has_gated_delta_net


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
        has_servers=False,
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


@pytest.mark.skipif(not has_gated_delta_net(), reason="HybridModel's layers have been there since Megatron-Core 0.19")
def test_recurrent_layers_at_home_are_numbered_as_layers_with_attention_are() -> None:
    from megatron_patches.layers.hybrid_stack import DisaggregatedStack

    numbers: list[int] = []

    def recur(_: Any, number: int, what: Any, parameters: Any, mixed: torch.Tensor, *others: Any) -> torch.Tensor:
        numbers.append(number)
        return mixed

    mixer = SimpleNamespace(
        layer_number=3,  # of "-*G"
        recurrence=None,
        core_parameters=None,
        pre=lambda hidden: (hidden, hidden, hidden, hidden),
        mixed=lambda o, residual: ((o, None), residual),
        added=lambda branch, residual: branch[0] + residual,
    )
    unit, hidden = BoundRecurrentUnit(Unit(mixer, (), []), (), None), torch.ones(2, 1, 3)
    output = DisaggregatedStack._run_unit(SimpleNamespace(pool=None), unit, SimpleNamespace(recur=recur), hidden)
    assert numbers == [2] and torch.equal(output, 2 * hidden)
