"""Optimizers and clipping that do not read gradients of a CAD model are named; those that do are left alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # as scripts import them, before a model is trained

from distca.errors import SupportError
from distca.testing.ranks import run_ranks
from megatron_patches.training import unread_gradients
from tests.megatron_patches import small_cases

MOST = 10
"""Steps that an optimizer takes, more than after which it is warned of."""


class ReadsGrad(torch.optim.Optimizer):
    """A user's own, which reads ``grad`` as torch's do."""

    attribute = "grad"

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if (gradient := getattr(weight, self.attribute, None)) is not None:
                    weight -= group["lr"] * gradient


class ReadsMainGrad(ReadsGrad):
    attribute = "main_grad"


class OwnSGD(torch.optim.SGD):
    """torch's, with a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            weight -= 1e-3 * weight.main_grad


def _handed_over(ddp: Any) -> None:
    for weight in ddp.parameters():
        weight.grad = weight.main_grad.to(weight.dtype)


def _handed_over_and_clipped(ddp: Any) -> None:
    _handed_over(ddp)
    assert clip_grad_norm_(ddp.parameters(), 1e-3) > 1e-3
    norm = torch.linalg.vector_norm(torch.cat([weight.main_grad.flatten() for weight in ddp.parameters()]))
    assert norm < 1.01e-3


def _megatrons(distributed: bool) -> Callable[[Any], Any]:
    def built(ddp: Any) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        settings = OptimizerConfig(lr=1e-3, use_distributed_optimizer=distributed, params_dtype=torch.float32)
        return get_megatron_optimizer(settings, [ddp])

    return built


_OTHER = torch.nn.Parameter(torch.ones(2))
OPTIMIZERS: dict[str, tuple[bool, Callable[[Any], Any], Callable[[Any], None]]] = {
    # Whether gradients are in shards, what is built, and what is done before each of its steps.
    "AdamW": (True, lambda ddp: torch.optim.AdamW(ddp.parameters(), lr=1e-3), lambda _: None),
    "SGD of some": (False, lambda ddp: torch.optim.SGD(list(ddp.parameters())[:2], lr=1e-3), lambda _: None),
    "own, of grad": (False, lambda ddp: ReadsGrad(ddp.parameters(), lr=1e-3), lambda _: None),
    "AdamW, handed over": (False, lambda ddp: torch.optim.AdamW(ddp.parameters(), lr=1e-3), _handed_over),
    "AdamW, clipped": (False, lambda ddp: torch.optim.AdamW(ddp.parameters(), lr=1e-3), _handed_over_and_clipped),
    "clipped by norm": (False, _megatrons(False), lambda ddp: clip_grad_norm_(ddp.parameters(), 1.0)),
    "clipped by value": (True, _megatrons(True), lambda ddp: clip_grad_value_(next(ddp.parameters()), 1.0)),
    "clipping of other weights": (False, _megatrons(False), lambda _: clip_grad_norm_([_OTHER], 1.0)),
    "own, of main_grad": (False, lambda ddp: ReadsMainGrad(ddp.parameters(), lr=1e-3), lambda _: None),
    "own, at rate 0": (False, lambda ddp: ReadsMainGrad(ddp.parameters(), lr=0.0), lambda _: None),
    "SGD's own": (False, lambda ddp: OwnSGD(ddp.parameters(), lr=1e-3), lambda _: None),
    "Megatron's": (False, _megatrons(False), lambda _: None),
    "Megatron's, in shards": (True, _megatrons(True), lambda _: None),
    "of other weights": (False, lambda _: torch.optim.SGD([_OTHER]), lambda _: None),
}


def _steps(sharded: bool, build: Callable[[Any], Any], before: Callable[[Any], None]) -> tuple[str, list[str]]:
    """What ends a loop with an optimizer, and what is warned of in it."""
    from megatron.core.models.gpt import GPTModel

    from distca import CAD
    from distca.parity.cases import ParityShape
    from megatron_patches.model.gpt import transformer_config
    from megatron_patches.training.training_step import summed_loss_step

    shape = ParityShape()
    config = transformer_config(shape, torch.float32, cpu_initialization=True)
    cad = CAD(config, tokens_per_rank=60)
    model = cad.attach(GPTModel(config, cad.block_spec(), shape.vocabulary, 0, position_embedding_type="rope"))
    ddp, step = cad.data_parallel(model, distributed_optimizer=sharded), cad.plan_step([[np.arange(7)]])
    optimizer = build(ddp)
    # Without gradients a step is anybody's own affair.
    optimizer.step()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_patches.training.unread_gradients").addHandler(handler)
    try:
        for _ in range(MOST):
            cad.forward_backward(step, summed_loss_step, ddp)
            before(ddp)
            optimizer.step()
    except SupportError as error:
        return str(error), warnings
    finally:
        logging.getLogger("megatron_patches.training.unread_gradients").removeHandler(handler)
    return "", warnings


def _all() -> dict[str, tuple[str, list[str]]]:
    small_cases.on_cpu()
    from megatron_patches.ranks.groups import initialize_model_parallel

    initialize_model_parallel(1, 1, 1)
    return {name: _steps(*how) for name, how in OPTIMIZERS.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[str, list[str]]]:
    """What is said of each optimizer."""
    return run_ranks(1, _all)[0]


def test_torchs_optimizers_without_gradients_are_refused_at_their_first_step(found: Any) -> None:
    for name in ("AdamW", "SGD of some"):
        said, warned = found[name]
        assert said.startswith(f"{name.split()[0]} trained nothing: it reads `grad` of each weight") and not warned


def test_clipping_of_no_gradients_is_refused(found: Any) -> None:
    for name in ("clipped by norm", "clipped by value"):
        said, warned = found[name]
        assert said.startswith("torch.nn.utils clipped nothing: it reads `grad` of each weight") and not warned


REFUSED = ("AdamW", "SGD of some", "own, of grad", "clipped by norm", "clipped by value")


def test_an_optimizer_that_changes_no_weight_is_warned_of_once(found: Any) -> None:
    said, (warning,) = found["own, of grad"]
    assert said == "" and warning.startswith("ReadsGrad changed no weight in 8 steps")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in REFUSED])
def test_right_loops_hear_nothing(found: Any, name: str) -> None:
    assert found[name] == ("", [])


class _Model:
    """The part of Megatron's wrapper that the watch reads."""

    def __init__(self) -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        weight.main_grad = torch.ones(3)  # type: ignore[attr-defined]
        self.param_to_bucket_group = {weight: None}


def test_an_optimizer_of_two_models_is_warned_of_for_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models = [_Model(), _Model()]
    monkeypatch.setattr(unread_gradients, "_trained", models)
    monkeypatch.setattr(unread_gradients.dist, "get_rank", lambda: 0)
    optimizer = ReadsGrad([weight for model in models for weight in model.param_to_bucket_group], lr=1e-3)
    for _ in range(unread_gradients.STEPS + 1):
        unread_gradients._look_at(optimizer)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "ReadsGrad changed no weight in 8 steps"
    ] * 2
