"""The public face from a user's training script: their own model, losses of tokens or their sum, and what is refused
in a sentence before anything waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distca.errors import PlanError, SupportError
from distca.testing.ranks import run_ranks
from tests.megatron_patches import small_cases

CPU = torch.device("cpu")
MICRO_BATCHES = ((13, 7, 1, 29, 3), (50, 2))
TOKENS_PER_RANK = 30
"""Two ranks hold 60; the largest micro-batch has 53."""


def _refused(function: Any, *arguments: Any, **options: Any) -> str:
    """What is said; empty if nothing is."""
    try:
        function(*arguments, **options)
    except (SupportError, PlanError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _own_model(cad: Any, config: Any, shape: Any) -> Any:
    """A user's subclass of GPTModel, with an argument, a parameter, a method and a forward of its own."""
    from megatron.core.models.gpt import GPTModel

    class OwnModel(GPTModel):
        def __init__(self, *arguments: Any, note: str, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.note, self.gain = note, torch.nn.Parameter(torch.ones(()))

        def described(self) -> str:
            return f"{self.note}, {len(self.decoder.layers)} layers"

        def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
            return super().forward(*arguments, **options) * self.gain

    model = OwnModel(config, cad.block_spec(), shape.vocabulary, 0, position_embedding_type="rope", note="mine")
    attached = cad.attach(model)
    assert attached is model and isinstance(model, OwnModel) and type(model).__name__ == "OwnModel"
    return model


def _train(cad: Any, model: Any, documents: Any) -> list[float]:
    """Losses of three steps of plain gradient descent on the same documents."""
    from megatron_patches.training_step import sum_over_ranks, summed_loss_step

    ddp, losses = cad.data_parallel(model, distributed_optimizer=False), []
    for _ in range(3):
        step = cad.plan_step(documents)
        total, tokens = sum_over_ranks(cad.forward_backward(step, summed_loss_step, ddp), CPU)
        losses.append(float(total / tokens))
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.main_grad
    return losses


def _called(model: Any, batch: Any) -> dict[str, Any]:
    """A call for losses of tokens, one for their sum, and calls that are refused."""
    rows = (batch.tokens, batch.positions, batch.attention)
    labels, mask = {"labels": batch.labels}, {"loss_mask": batch.loss_mask}
    with torch.no_grad():
        losses = model(*rows, **labels)
        return {
            "losses": losses,
            "mask": batch.loss_mask,
            "masked only": model(*rows, **labels, **mask),
            "summed": model(*rows, **labels, **mask, summed_loss=True),
            "no mask": _refused(model, *rows, **labels, summed_loss=True),
            "no labels": _refused(model, *rows, **mask, summed_loss=True),
            "no positions": _refused(model, batch.tokens, None, batch.attention, **labels),
            "after refusals": model(*rows, **labels),
        }


def _used() -> dict[str, Any]:
    """All cases that need two data-parallel ranks."""
    small_cases.on_cpu()
    import torch.distributed as dist

    from distca import CAD
    from megatron_patches.groups import destroy_model_parallel, initialize_model_parallel
    from megatron_patches.model import transformer_config
    from megatron_patches.parity import harness

    case = harness.ParityCase(micro_batches=MICRO_BATCHES)
    initialize_model_parallel(1, 1, 1)
    config = transformer_config(case.shape, torch.float32, cpu_initialization=True)
    destroy_model_parallel()
    found: dict[str, Any] = {"no groups": _refused(CAD, config, tokens_per_rank=TOKENS_PER_RANK)}

    initialize_model_parallel(1, 1, 1)
    cad = CAD(config, tokens_per_rank=TOKENS_PER_RANK)
    model, documents = _own_model(cad, config, case.shape), harness.case_documents(case)
    found["model"] = (model.note, model.described())
    found["not wrapped"] = [_refused(cad.forward_backward, None, None, each) for each in (model, [model])]
    found["called"] = _called(model, cad.plan_step(documents[:1]).batches[0])
    found["trained"] = _train(cad, model, documents)
    found["gain"] = float(model.gain.detach())

    found["full"] = _refused(cad.plan_step, [[np.zeros(60, np.int64)]])
    found["too many"] = _refused(cad.plan_step, [documents[0], [np.zeros(40, np.int64), np.zeros(21, np.int64)]])

    found["flat"] = [_refused(cad.plan_step, [each]) for each in (np.zeros(5, np.int64), torch.zeros(5).long())]
    wrong: dict[str, Any] = {
        "backward": "back", "recompute": "mlp", "level": "tim", "linears": "tee",
        "tokens_per_rank": 0, "tolerance": -1.0, "nvshmem_buffer_gb": float("nan"),
    }  # fmt: skip
    found["wrong"] = {name: _refused(CAD, config, **{"tokens_per_rank": 1, name: wrong[name]}) for name in wrong}

    other = [[np.zeros(50 + dist.get_rank(), np.int64), np.zeros(3, np.int64)]]
    ahead = cad.plan_ahead([documents, other, documents], first=7)
    assert next(ahead).plan.tokens == sum(map(sum, MICRO_BATCHES))
    found["different"] = _refused(next, ahead)
    found["again"] = len(list(cad.plan_ahead([documents, documents])))
    return found


@pytest.fixture(scope="module")
def used() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(2, _used)


def test_a_subclass_of_gptmodel_stays_one_and_trains(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert rank["model"] == ("mine", "mine, 2 layers")
        first, second, third = rank["trained"]
        assert first > second > third, "no step made the loss smaller"
        assert rank["gain"] < 1, "the model's own parameter was not trained"
    assert used[0]["trained"] == used[1]["trained"] and used[0]["gain"] == used[1]["gain"]


def test_losses_are_those_of_tokens_and_summed_only_by_name(used: list[dict[str, Any]]) -> None:
    for rank in used:
        called = rank["called"]
        losses, mask = called["losses"], called["mask"]
        assert losses.shape == mask.shape == (1, losses.numel()) and 0 < mask.sum() < mask.numel()
        assert torch.equal(called["masked only"], losses), "a mask alone sums nothing"
        assert torch.equal(called["after refusals"], losses)
        assert called["summed"].shape == ()
        assert float(called["summed"]) == pytest.approx(float((losses * mask).sum()), rel=1e-6)


def test_calls_that_lack_something_are_refused(used: list[dict[str, Any]]) -> None:
    for rank in used:
        for case in ("no mask", "no labels"):
            assert rank["called"][case].startswith("SupportError: summed_loss needs labels and loss_mask")
        assert rank["called"]["no positions"].startswith("SupportError: The model was called without position_ids")


def test_a_model_whose_gradients_nobody_reduces_is_refused(used: list[dict[str, Any]]) -> None:
    for rank in used:
        for said in rank["not wrapped"]:
            assert said.startswith("SupportError: The model is a ") and "train what CAD.data_parallel returns" in said


def test_the_face_needs_megatrons_groups(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert rank["no groups"].startswith("SupportError: ") and "initialize_model_parallel" in rank["no groups"]


def test_options_that_mean_nothing_are_refused(used: list[dict[str, Any]]) -> None:
    for rank in used:
        said = rank["wrong"]
        assert said["recompute"] == "SupportError: `recompute` is 'mlp'; it can be none, all."
        assert said["tolerance"] == "SupportError: `tolerance` is -1.0; it must be at least 0."
        assert all(text.startswith(f"SupportError: `{name}` is ") for name, text in said.items()), said


def test_a_micro_batch_of_more_tokens_than_ranks_hold_is_refused(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert rank["full"] == ""
        assert rank["flat"] == 2 * [
            "PlanError: Micro-batch 0 has numbers in place of documents; give each as a list of them."
        ]
        assert rank["too many"].startswith("PlanError: Micro-batch 1 has 61 tokens; 2 data-parallel ranks with")
        assert "tokens_per_rank 30 hold 60" in rank["too many"]


def test_ranks_that_plan_differently_all_hear_of_it(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert rank["different"].startswith("PlanError: 1 of 2 ranks (1) planned step 8 differently from rank 0")
        assert rank["again"] == 2, "the face is of use afterwards"


def _in_stages() -> tuple[str, list[torch.Tensor]]:
    small_cases.on_cpu()
    from megatron_patches.parity.harness import ParityCase
    from megatron_patches.training_step import run_schedule, summed_loss_step

    case, gradients = ParityCase(micro_batches=MICRO_BATCHES, pp=2), []
    for frozen in ((), ("embedding", "layers")):
        cad, model, step = small_cases.ready(case, frozen=frozen)
        cad.forward_backward(step, summed_loss_step, model)
        gradients += [each.main_grad.clone() for name, each in model.named_parameters() if "output" in name]
    return _refused(run_schedule, model, step.batches, summed_loss_step), gradients


@pytest.fixture(scope="module")
def stages() -> list[tuple[str, list[torch.Tensor]]]:
    return run_ranks(2, _in_stages, timeout=60)


def test_megatrons_pipeline_schedule_is_refused_by_every_stage(stages: list[tuple[str, list[torch.Tensor]]]) -> None:
    assert len({said for said, _ in stages}) == 1
    assert stages[0][0].endswith("run it with CAD.forward_backward.")


def test_a_stage_of_frozen_weights_takes_part_in_backward(stages: list[tuple[str, list[torch.Tensor]]]) -> None:
    (_, first), (_, (learned, with_frozen)) = stages
    assert not first and learned.norm() > 0 and torch.equal(learned, with_frozen)
