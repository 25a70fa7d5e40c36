"""Documents with nothing to learn weigh nothing: loss and gradient norm are the same with and without them, on any
number of ranks, whatever weighs the same in the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.data.corpus import document_weights
from tests.train.small_runs import LONGEST, StepByStep, arguments, write_texts

pytestmark = pytest.mark.slow

LOSSES = ("token", "document")
LENGTHS = ((40, 25), (60, 12), (30, 29))
"""Tokens of each document, and of its end that is learned."""


class Talk(list[int]):
    """Token ids of which the last are learned, and the first one too, which has nothing before it."""

    def __init__(self, seed: int, length: int, learned: int) -> None:
        super().__init__(np.random.default_rng(seed).integers(0, 256, length).tolist())
        self._mask = np.arange(length) >= length - learned
        self._mask[0] = True

    def learned(self, tokens: slice) -> np.ndarray:
        return self._mask[tokens]


def _micro_batches(masked: bool) -> list[list[Talk]]:
    talks = [Talk(number, *sizes) for number, sizes in enumerate(LENGTHS)]
    if not masked:
        return [talks[:2], talks[2:]]
    nothing = [Talk(9 + number, length, 0) for number, length in enumerate((50, 1, 70))]
    return [[nothing[0], *talks[:2]], [talks[2], nothing[1]], nothing[2:]]


def _figures(line: list[str]) -> dict[tuple[str, bool], tuple[float, float]]:
    """(loss, gradient norm) of a step without an update, by train.loss and whether masked documents are in it."""
    from megatron_patches.patches.cpu import use_cpu
    from megatron_patches.steps.step_documents import StepDocuments
    from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

    use_cpu()
    run: Any = StepByStep(parse_run_config(line))
    trainer, found = run.trainer, {}
    for loss in LOSSES:
        for masked in (False, True):
            micro_batches = _micro_batches(masked)
            weights = document_weights(micro_batches) if loss == "document" else None
            step = trainer.cad.plan_step(StepDocuments(micro_batches, weights=weights))
            reports = trainer.cad.forward_backward(step, summed_loss_step, trainer.model)
            total, targets = sum_over_ranks(reports, run.world.device)
            assert targets == sum(learned for _, learned in LENGTHS)
            found[loss, masked] = float(total / targets), float(trainer.optimizer.step()[0])
    run.close()
    return found


def test_masked_documents_weigh_nothing(tmp_path: Path) -> None:
    by_ranks = {}
    write_texts(tmp_path / "texts")
    for ranks in (1, 2, 4):
        line = arguments(
            data__path=tmp_path / "texts",
            output=tmp_path,
            data__tokens_per_rank=2 * LONGEST // min(ranks, 2),
            optimizer__lr=1e-30,
            optimizer__min_lr=0,
            optimizer__schedule="constant",
            optimizer__warmup_steps=0,
        )
        by_ranks[ranks] = run_ranks(ranks, _figures, line)[0]
    for loss in LOSSES:
        alone = by_ranks[1][loss, False]
        for figures in by_ranks.values():
            for masked in (False, True):
                assert figures[loss, masked] == pytest.approx(alone, rel=2e-6), (loss, masked)
    token, document = (by_ranks[1][loss, False] for loss in LOSSES)
    assert abs(token[1] / document[1] - 1) > 1e-3, "the two weigh otherwise"
