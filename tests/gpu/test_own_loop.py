"""A training loop of one's own on GPUs: steps planned ahead, with one for validation planned after each, are those that
are planned one by one."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import distca
from tests.gpu.starts import Case, Starts

pytestmark = pytest.mark.gpu

SHAPE = {"num_layers": 2, "hidden_size": 512, "ffn_hidden_size": 1024, "num_attention_heads": 4, "num_query_groups": 2}
STEPS = 4
SEED = 1234


def _losses(ahead: bool, dtype: torch.dtype = torch.bfloat16) -> list[float]:
    """Of every training step and of the same documents after it."""
    warnings.filterwarnings("ignore")
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from examples import own_training_loop as example
    from megatron_patches.ranks.groups import initialize_model_parallel
    from megatron_patches.training.training_step import sum_over_ranks

    initialize_model_parallel(1, 1, SEED)
    with patch.object(distca, "CAD", partial(distca.CAD, deterministic=True)):
        cad, model = example.build(example.config_of(1, 1, dtype, **SHAPE))
    on_gpu = dtype == torch.bfloat16
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, bf16=on_gpu, params_dtype=dtype), [model]
    )
    held, *given = example.documents(STEPS + 1, cad.options.ranks)

    def loss(step: object, forward_only: bool) -> float:
        reports = cad.forward_backward(step, example.forward_step, model, forward_only=forward_only)
        total, tokens = sum_over_ranks(reports, cad.device)
        return float(total / tokens)

    found = []
    for step in cad.plan_ahead(given) if ahead else map(cad.plan_step, given):
        found.append(loss(step, False))
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss(cad.plan_step(held), True))
    return found


def _both() -> list[list[float]]:
    """Losses of steps that are planned one by one, and ahead."""
    return [_losses(ahead) for ahead in (False, True)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_planned_ahead_are_those_planned_one_by_one(ranks: int, starts: Starts) -> None:
    one_by_one, ahead = zip(*starts.result(str(ranks)), strict=True)
    assert ahead == one_by_one
    assert len(set(ahead[0])) == 2 * STEPS, "the weights stay as they are"


def _copied_for_the_callers_stream() -> bool:
    """Whether a stream of the caller's reads the rows that were planned, while the device's own stream is busy."""
    warnings.filterwarnings("ignore")
    from examples import own_training_loop as example
    from megatron_patches.ranks.groups import initialize_model_parallel

    initialize_model_parallel(1, 1, SEED)
    cad = distca.CAD(example.config_of(1, 1, torch.bfloat16, **SHAPE), tokens_per_rank=example.TOKENS_PER_RANK)
    (documents,) = example.documents(1, cad.options.ranks)
    cad.plan_step(documents)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    with torch.cuda.stream(torch.cuda.Stream()):
        rows = cad.plan_step(documents).batches[0].tokens
        read = rows.clone()
    torch.cuda.synchronize()
    return torch.equal(read, rows)


def cases(_: Path) -> dict[str, Case]:
    rows = test_rows_are_copied_for_the_callers_stream.__name__
    return {"1": Case(1, _both), "2": Case(2, _both), rows: Case(1, _copied_for_the_callers_stream)}


def test_rows_are_copied_for_the_callers_stream(starts: Starts) -> None:
    assert all(starts.result(test_rows_are_copied_for_the_callers_stream.__name__))
