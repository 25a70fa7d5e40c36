"""Models beside each other, and with an optimizer: what one does is the same as if it were alone."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from distca.errors import SupportError
from distca.testing.ranks import run_ranks
from tests.megatron_patches import small_cases

CPU = torch.device("cpu")
LENGTHS = (13, 7, 1, 29, 3)
GROWING = (1, 2, 3)
"""Micro-batches of each step. The first one says when gradients are reduced."""


def _said(function: Any, *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except SupportError as error:
        return str(error)
    return ""


def _gradients(beside: bool) -> list[torch.Tensor]:
    """Of steps of more and more micro-batches; with another wrapped model of the same configuration, or without."""
    from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

    cad, model, config, shape = _policy()
    ddp = cad.data_parallel(model, distributed_optimizer=False)
    if beside:
        _wrapped(cad, config, shape)
    random, found = np.random.default_rng(1), []
    for count in GROWING:
        documents = [[random.integers(0, shape.vocabulary, length) for length in LENGTHS] for _ in range(count)]
        sum_over_ranks(cad.forward_backward(cad.plan_step(documents), summed_loss_step, ddp), CPU)
        found.append(torch.cat([each.main_grad.flatten().clone() for each in model.parameters()]))
    return found


def _policy(disaggregate: bool = True) -> tuple[Any, Any, Any, Any]:
    from distca import CAD
    from distca.parity.cases import ParityCase
    from megatron_patches.model.gpt import transformer_config

    shape = ParityCase(micro_batches=((1,),)).shape
    config = transformer_config(shape, torch.float32, cpu_initialization=True)
    cad = CAD(config, tokens_per_rank=60, disaggregate=disaggregate)
    return cad, _attached(cad, config, shape), config, shape


def _attached(cad: Any, config: Any, shape: Any, kind: Any = None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    kind = kind or GPTModel
    return cad.attach(kind(config, cad.block_spec(), shape.vocabulary, 0, position_embedding_type="rope"))


def _wrapped(cad: Any, config: Any, shape: Any) -> Any:
    return cad.data_parallel(_attached(cad, config, shape), distributed_optimizer=False)


def _drift(in_ddp: bool, in_optimizer: bool, broken: bool = False) -> tuple[str, bool]:
    """What is said of three steps of an optimizer, with weights that are no numbers or others; and whether it was noted
    that weights were gathered."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_patches.training.training_step import summed_loss_step

    cad, model, _, shape = _policy()
    ddp = cad.data_parallel(model, distributed_optimizer=in_ddp)
    settings = OptimizerConfig(lr=1e-3, use_distributed_optimizer=in_optimizer, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(settings, [ddp])
    step = cad.plan_step([[np.arange(length) % shape.vocabulary for length in LENGTHS]])
    if broken:
        for weight in model.parameters():
            weight.data.fill_(math.nan)
    for _ in range(3):
        if said := _said(cad.forward_backward, step, summed_loss_step, ddp):
            return said, ddp.weights_gathered
        optimizer.step()
        optimizer.zero_grad()
    return "", ddp.weights_gathered


def _mixed_up() -> dict[str, str]:
    """What is said of a step of another kind of CAD, and of models with outputs of their own."""
    from megatron.core.models.gpt import GPTModel

    from megatron_patches.training.training_step import summed_loss_step

    class Colder(GPTModel):
        def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return super().compute_language_model_loss(labels, logits / 0.5)

    (cad, model, config, shape), (home, home_model, *_) = _policy(), _policy(disaggregate=False)
    documents = [[np.arange(length) % shape.vocabulary for length in LENGTHS]]
    step = cad.plan_step(documents)
    at_home = home.plan_step(_at_home(documents))
    colder, hooked = _attached(cad, config, shape, Colder), _attached(cad, config, shape)
    hooked.output_layer.register_forward_hook(lambda *_: None)
    watched, compiled, replaced = (_attached(cad, config, shape) for _ in range(3))
    watched.output_layer.register_full_backward_hook(lambda *_: None)
    with patch("torch.compile", lambda call, **_: call):  # the real one imports for seconds, and nothing is called
        compiled.output_layer.compile()
    replaced.output_layer.forward = lambda *_, **__: None
    options = {"forward_only": True}
    bare = GPTModel(config, cad.block_spec(), shape.vocabulary, 0, position_embedding_type="rope")
    return {
        "home step": _said(cad.forward_backward, at_home, summed_loss_step, model, **options),
        "other step": _said(home.forward_backward, step, summed_loss_step, home_model, **options),
        "own loss": _said(cad.forward_backward, step, summed_loss_step, colder, **options),
        "own hook": _said(cad.log_probabilities, step, hooked),
        "own backward hook": _said(cad.log_probabilities, step, watched),
        "compiled": _said(cad.log_probabilities, step, compiled),
        "own forward": _said(cad.log_probabilities, step, replaced),
        "not attached": _said(cad.log_probabilities, step, bare),
        "as it should be": _said(cad.log_probabilities, step, model),
    }


def _at_home(documents: Any) -> Any:
    from distca import StepDocuments

    return StepDocuments(documents, [np.arange(len(each)) % 2 for each in documents])


def _left_of_a_model() -> tuple[int, list[Any]]:
    """Weights of a model that was trained, when it is gone and its CAD is not; and what a new model evaluates then."""
    from megatron_patches.training.training_step import summed_loss_step

    cad, model, config, shape = _policy()
    ddp = cad.data_parallel(model, distributed_optimizer=False)
    step = cad.plan_step([[np.arange(length) % shape.vocabulary for length in LENGTHS]])
    cad.forward_backward(step, summed_loss_step, ddp)
    weights = [weakref.ref(weight) for weight in model.parameters()]
    del model, ddp
    gc.collect()
    left = sum(weight() is not None for weight in weights)
    return left, cad.log_probabilities(step, _attached(cad, config, shape))


def _all() -> dict[str, Any]:
    small_cases.on_cpu()
    from megatron_patches.ranks.groups import initialize_model_parallel

    initialize_model_parallel(1, 1, 1)
    return {
        "alone": _gradients(beside=False),
        "beside": _gradients(beside=True),
        "optimizers": {both: _drift(*both) for both in ((True, False), (True, True), (False, False))},
        "broken": _drift(True, False, broken=True),
        "mixed up": _mixed_up(),
        "left": _left_of_a_model(),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(2, _all)


def test_gradients_are_reduced_whichever_model_was_wrapped_last(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for alone, beside in zip(rank["alone"], rank["beside"], strict=True):
            assert alone.norm() > 0 and torch.equal(alone, beside)


def test_an_optimizer_without_shards_is_refused_where_gradients_have_some(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said, gathered = rank["optimizers"][True, False]
        assert said.startswith("Weights differ between data-parallel ranks") and "use_dist" in said
        assert not gathered
        assert rank["optimizers"][True, True] == rank["optimizers"][False, False] == ("", True)


def test_weights_that_are_no_numbers_are_not_said_to_differ(found: list[dict[str, Any]]) -> None:
    assert [rank["broken"] for rank in found] == [("", False)] * 2


def test_steps_and_models_that_do_not_fit_are_sentences(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["mixed up"]
        for name in ("home step", "other step"):
            assert said[name].startswith(
                "The step was planned by a CAD whose `disaggregate` is not that of the model's"
            )
        assert said["own loss"].startswith("The model has a compute_language_model_loss of its own, which summed_loss")
        for name in ("own hook", "own backward hook"):
            assert said[name].startswith("The model has hooks on its output layer, which summed_loss")
        assert said["compiled"].startswith("The model has a compiled output layer, which summed_loss")
        assert said["own forward"].startswith("The model has a forward of its own in its output layer, which summed")
        assert "GPTModel that was not attached" in said["not attached"]
        assert said["as it should be"] == ""


def test_a_model_goes_though_its_cad_stays(found: list[dict[str, Any]]) -> None:
    for rank in found:
        left, ((*documents,),) = rank["left"]
        assert left == 0 and [len(each) for each in documents] == [length - 1 for length in LENGTHS]
