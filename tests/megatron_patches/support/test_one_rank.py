"""What one rank alone refuses is refused on all ranks, none of which then waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.testing.ranks import run_ranks
from tests.megatron_patches import small_cases
from tests.megatron_patches.support.cases import refusal

REFUSALS = {
    # The rank, which is a pipeline stage, and how its sentence begins.
    "the configuration": (1, "attention_dropout is 0.1"),
    "an argument": (0, "`tolerance` is -1.0"),
    "an argument that may differ": (1, "keep_outputs is True, but recompute is 'all'"),
    "a module": (1, "decoder.layers.0.mlp is a torch.nn.modules.linear.Identity"),
    "the type of a weight": (0, "decoder.layers.0.mlp.linear_fc1.weight has type torch.float64"),
    "a trained bias": (1, "output_layer.bias is trained"),
    "a step": (1, "decoder.layers.0.mlp.linear_fc1.weight was frozen"),
    "an evaluation": (0, "The model was called inside of torch.autocast"),
}


def _refusals() -> dict[str, str | None]:
    small_cases.on_cpu()
    from megatron.core.models.gpt import GPTModel

    from distca import CAD
    from distca.parity.cases import ParityShape
    from megatron_patches.model.gpt import transformer_config
    from megatron_patches.ranks.groups import initialize_model_parallel
    from megatron_patches.training.training_step import summed_loss_step

    initialize_model_parallel(1, 2, 1)
    shape, stage = ParityShape(), dist.get_rank()
    config = replace(
        transformer_config(shape, torch.float32, cpu_initialization=True),
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    found: dict[str, str | None] = {}

    def said(name: str, right: Any, wrong: Any, call: Callable[[Any], Any]) -> None:
        found[name] = refusal(call, wrong if stage == REFUSALS[name][0] else right)

    def built() -> Any:
        ends = {"pre_process": stage == 0, "post_process": stage == 1}
        return GPTModel(config, cad.block_spec(), shape.vocabulary, 0, position_embedding_type="rope", **ends)

    def fc1(model: Any) -> Any:
        return model.decoder.layers[0].mlp.linear_fc1

    said("the configuration", 0.0, 0.1, lambda rate: CAD(replace(config, attention_dropout=rate), tokens_per_rank=60))
    said("an argument", 0.1, -1.0, lambda tolerance: CAD(config, tokens_per_rank=60, tolerance=tolerance))
    said(
        "an argument that may differ",
        False,
        True,
        lambda keep: CAD(config, tokens_per_rank=60, recompute="all", keep_outputs=keep),
    )
    cad = CAD(config, tokens_per_rank=60)
    other = built()
    other.decoder.layers[0].mlp = torch.nn.Identity()
    said("a module", built(), other, cad.attach)
    model, other, biased = (cad.attach(built()) for _ in range(3))
    fc1(other).double()
    said("the type of a weight", model, other, cad.data_parallel)
    if stage == 1:
        biased.output_layer.bias = torch.nn.Parameter(torch.zeros(shape.vocabulary))
        biased.output_layer.weight.requires_grad = False
    said("a trained bias", biased, biased, cad.data_parallel)
    model = cad.data_parallel(model)
    step = cad.plan_step([[np.arange(7)]])

    def evaluated(enabled: bool) -> None:
        with torch.autocast("cpu", enabled=enabled):
            cad.forward_backward(step, summed_loss_step, model, forward_only=True)

    def trained(requires: bool) -> None:
        fc1(model.module).weight.requires_grad = requires
        cad.forward_backward(step, summed_loss_step, model)

    said("an evaluation", False, True, evaluated)
    said("a step", True, False, trained)
    evaluated(False)
    trained(True)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, str | None]]:
    return run_ranks(2, _refusals, timeout=60)


@pytest.mark.parametrize("name", REFUSALS)
def test_all_ranks_refuse_what_one_refuses(found: list[dict[str, str | None]], name: str) -> None:
    rank, sentence = REFUSALS[name]
    own, others = found[rank][name], found[1 - rank][name]
    assert own is not None and own.startswith(sentence)
    assert others == f"Rank {rank} refuses: {own}"
