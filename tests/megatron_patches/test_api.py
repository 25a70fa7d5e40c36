"""The public API from a user's training script: their own model, losses of tokens or their sum, and what is refused
in a sentence before anything waits."""

from __future__ import annotations

from dataclasses import replace
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
    except (SupportError, PlanError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Stops:
    """A document that reads from an iterator which is at its end."""

    def __len__(self) -> int:
        raise StopIteration

    def __getitem__(self, _: slice) -> Any:
        raise StopIteration


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


def _train(cad: Any, ddp: Any, model: Any, documents: Any) -> list[float]:
    """Losses of three steps of plain gradient descent on the same documents."""
    from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

    losses = []
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
            "no attention": [_refused(model, *rows[:2], mask, **labels) for mask in (None, batch.loss_mask)],
            "after refusals": model(*rows, **labels),
        }


def _losses_refused(cad: Any, ddp: Any, step: Any) -> dict[str, str]:
    """What is said to forward steps and loss functions that return something else than they should."""

    def said(*returned: Any, of_step: Any = None) -> str:
        def forward_step(batches: Any, model: Any) -> Any:
            batch = next(batches)
            if of_step == "two batches":
                next(batches)
            output = model(batch.tokens, batch.positions, batch.attention, labels=batch.labels)
            losses = {"sum": output.sum(), "each": output, "tokens": batch.loss_mask.sum().int()}
            losses |= {"sum [1]": losses["sum"].reshape(1), "tokens [1, 1]": losses["tokens"].reshape(1, 1)}
            values = tuple(losses.get(value, value) for value in returned)
            return of_step or (output, lambda _: values)

        return _refused(cad.forward_backward, step, forward_step, ddp)

    return {
        "two batches": said("sum", "tokens", None, of_step="two batches"),
        "no batch": _refused(cad.forward_backward, step, lambda _, __: (torch.ones(()), None), ddp),
        "bool": said("sum", torch.tensor(True), None),
        "two": said("sum", "reported"),
        "each": said("each", "tokens", None),
        "floats": said("sum", torch.ones(()), None),
        "constant": said(torch.zeros(()), "tokens", None),
        "no function": said(of_step=torch.ones(())),
        "as it should be": said("sum", "tokens", None),
        "of one element": said("sum [1]", "tokens [1, 1]", None),
    }


def _rows_refused(cad: Any, documents: Any) -> list[str]:
    """Figures of a step's documents in the order in which they were given, where the plan dealt them anew; then in the
    plan's order."""
    from distca import rows_of

    step = cad.plan_step(documents)
    for given in (documents, step.documents.micro_batches):
        figures = [[torch.arange(len(each)) for each in micro_batch] for micro_batch in given]
        if given is documents:
            found = [_refused(rows_of, *each) for each in zip(step.batches, figures, strict=True)]
            of: list[Any] = [figures[0][:1], torch.zeros(70), [0.5], [["a"]], [[[0.5, 0.5], [0.5]]]]
            found += [_refused(rows_of, step.batches[0], each) for each in of]
    for batch, of in zip(step.batches, figures, strict=True):
        rows = rows_of(batch, of)
        assert torch.equal(rows, torch.where(batch.documents >= 0, batch.positions, 0))
        assert torch.equal(rows_of(batch, [each.numpy() for each in of]), rows)
        assert torch.equal(rows_of(batch, [each.tolist() for each in of]), rows)
    empty = cad.plan_step([[]]).batches[0]
    assert rows_of(empty, []).shape == empty.tokens.shape
    return found


def _used() -> dict[str, Any]:
    """All cases that need two data-parallel ranks."""
    small_cases.on_cpu()
    import torch.distributed as dist
    from megatron.core.models.gpt import GPTModel
    from torch._dynamo import OptimizedModule

    from distca import CAD, StepDocuments
    from distca.parity.cases import ParityCase, case_documents
    from megatron_patches.model.gpt import transformer_config
    from megatron_patches.ranks.groups import destroy_model_parallel, initialize_model_parallel

    case = ParityCase(micro_batches=MICRO_BATCHES)
    initialize_model_parallel(1, 1, 1)
    config = transformer_config(case.shape, torch.float32, cpu_initialization=True)
    destroy_model_parallel()
    found: dict[str, Any] = {"no groups": _refused(CAD, config, tokens_per_rank=TOKENS_PER_RANK)}

    initialize_model_parallel(1, 1, 1)
    cad = CAD(config, tokens_per_rank=TOKENS_PER_RANK)
    model, documents = _own_model(cad, config, case.shape), case_documents(case)
    found["model"] = (model.note, model.described())
    found["not wrapped"] = [_refused(cad.forward_backward, None, None, each) for each in (model, [model])]
    found["called"] = _called(model, cad.plan_step(documents[:1]).batches[0])
    ddp = cad.data_parallel(model, distributed_optimizer=False)
    found["trained"] = _train(cad, ddp, model, documents)
    found["gain"] = float(model.gain.detach())

    found["losses"] = _losses_refused(cad, ddp, cad.plan_step(documents))
    compiled = OptimizedModule(model, lambda call: call)  # as torch.compile gives, which imports for seconds
    wrapped = (ddp, [model], compiled, None)
    found["not bare"] = [_refused(cad.attach, each) for each in wrapped]
    unattached = GPTModel(config, cad.block_spec(), case.shape.vocabulary, 0, position_embedding_type="rope")
    found["not attached"] = [_refused(cad.data_parallel, each) for each in (unattached, *wrapped)]
    found["wrapped twice"], found["attached twice"] = _refused(cad.data_parallel, model), _refused(cad.attach, model)
    found["rows of others"] = _rows_refused(cad, documents)

    found["full"] = _refused(cad.plan_step, [[np.zeros(60, np.int64)]])
    found["too many"] = _refused(cad.plan_step, [documents[0], [np.zeros(40, np.int64), np.zeros(21, np.int64)]])

    found["no such server"] = _refused(cad.let_server_go, 3)
    found["no such home"] = _refused(cad.plan_step, StepDocuments([[np.zeros(3, np.int64)] * 2], [[0, 2]]))
    found["stops"] = _refused(list, cad.plan_ahead([documents, [[_Stops()]], documents]))
    found["flat"] = [_refused(cad.plan_step, [each]) for each in (np.zeros(5, np.int64), torch.zeros(5).long())]
    wrong: dict[str, Any] = {
        "backward": "back", "recompute": "mlp", "level": "tim", "linears": "tee",
        "tokens_per_rank": 0, "tolerance": -1.0, "nvshmem_buffer_gb": float("nan"),
    }  # fmt: skip
    found["wrong"] = {name: _refused(CAD, config, **{"tokens_per_rank": 1, name: wrong[name]}) for name in wrong}
    kinds: dict[str, Any] = {"tokens_per_rank": ("128k", 0.5, None), "tolerance": ("small",)}
    found["kinds"] = [
        _refused(CAD, config, **{"tokens_per_rank": 1, name: value}) for name in kinds for value in kinds[name]
    ]

    other = [[np.zeros(50 + dist.get_rank(), np.int64), np.zeros(3, np.int64)]]
    ahead = cad.plan_ahead([documents, other, documents], first=7)
    assert next(ahead).plan.tokens == sum(map(sum, MICRO_BATCHES))
    found["different"] = _refused(next, ahead)
    found["again"] = len(list(cad.plan_ahead([documents, documents])))
    found["a single one"] = [_refused(cad.plan_step, other)]
    moved = [[(each + dist.get_rank()) % case.shape.vocabulary for each in of] for of in documents]
    found["a single one"].append(_refused(cad.plan_step, moved))
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
        none, tensor = rank["called"]["no attention"]
        assert none.startswith("SupportError: The model was called with a NoneType as attention_mask; pass the `a")
        assert tensor.startswith("SupportError: The model was called with a Tensor as attention_mask")


def test_losses_without_their_number_of_tokens_are_refused(used: list[dict[str, Any]]) -> None:
    for rank in used:
        said = rank["losses"]
        assert said["two"].startswith("SupportError: The loss function returned 2 values; it has to return three")
        assert said["each"].startswith("SupportError: The loss function's first value is no single number")
        assert said["constant"].startswith("SupportError: The loss function's first value needs no gradient, so this")
        assert said["bool"].startswith("SupportError: The loss function's second value is no integer tensor")
        assert said["two batches"].startswith("SupportError: The forward step took two batches: call next(batches)")
        assert said["no batch"].startswith("SupportError: The forward step took no batch")
        assert said["floats"].startswith("SupportError: The loss function's second value is no integer tensor")
        assert said["no function"].startswith("SupportError: The forward step has to return the model's output and a")
        assert said["as it should be"] == said["of one element"] == ""


def test_models_are_attached_bare_and_wrapped_once(used: list[dict[str, Any]]) -> None:
    for rank in used:
        for said, name in zip(rank["not bare"], ("Parallel", "list", "OptimizedModule", "NoneType"), strict=True):
            assert said.startswith("SupportError: The model is a ")
            assert f"{name}, but only a GPTModel is supported" in said
        assert len(rank["not attached"]) == 5
        assert all("that was not attached: " in said for said in rank["not attached"])
        assert rank["wrapped twice"].startswith("SupportError: The model is in a DistributedDataParallel already")
        assert rank["attached twice"] == "SupportError: The model is attached already: call CAD.attach once."


def test_figures_of_other_documents_are_refused(used: list[dict[str, Any]]) -> None:
    for rank in used:
        first, second, few, *no_rows = rank["rows of others"]
        assert "rows_of was given figures of " in first and "in the order of step.documents" in second
        assert "rows_of was given figures of 1 documents, and the micro-batch has " in few
        assert len(no_rows) == 4
        assert all(each.startswith("PlanError: rows_of takes a list with one list of figures") for each in no_rows)


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
        text, part, none, small = rank["kinds"]
        assert text == "SupportError: `tokens_per_rank` is '128k'; it must be a whole number."
        assert "it must be a whole number" in part and "it must be a whole number" in none
        assert small == "SupportError: `tolerance` is 'small'; it must be a number."


def test_tokens_homes_and_servers_that_ranks_do_not_have_are_refused(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert rank["full"] == ""
        assert rank["flat"] == [
            f"PlanError: Document 0 of micro-batch 0 is {found}; a step is a list of micro-batches, each a list of "
            "documents, each a row of token ids."
            for found in ("a int64", "an array of 0 dimensions")
        ]
        assert rank["no such server"].startswith("SupportError: There is no server 3; ")
        assert rank["no such home"] == "PlanError: Homes of micro-batch 0 name data-parallel rank 2; ranks are 0 to 1."
        assert rank["too many"].startswith("PlanError: Micro-batch 1 has 61 tokens; 2 data-parallel ranks with")
        assert "tokens_per_rank 30 hold 60" in rank["too many"]


def test_a_loop_does_not_end_where_a_document_fails(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert rank["stops"] == "RuntimeError: generator raised StopIteration"


def test_ranks_that_plan_differently_all_hear_of_it(used: list[dict[str, Any]]) -> None:
    for rank in used:
        assert rank["different"].startswith("PlanError: 1 of 2 ranks (1) planned step 8 differently from rank 0")
        assert rank["again"] == 2, "the CAD is of use afterwards"
        lengths, ids = rank["a single one"]
        assert lengths.startswith("PlanError: 1 of 2 ranks (1) planned step ") and "differently" in lengths
        assert ids.startswith("PlanError: 1 of 2 ranks (1) gave other documents to step ")


def _in_stages() -> tuple[str, list[torch.Tensor]]:
    """What Megatron's schedule is told, and gradients; ids and the loss are where they are read."""
    small_cases.on_cpu()
    from megatron.core import parallel_state

    from distca.parity.cases import ParityCase
    from distca.parity.disaggregated import token_losses_step
    from megatron_patches.training.training_step import run_schedule, summed_loss_step

    def forward_step(batches: Any, model: Any) -> Any:
        last = parallel_state.is_pipeline_last_stage()
        batch: Any = next(batches)
        output, loss = summed_loss_step(iter([replace(batch, tokens=None) if last else batch]), model)
        return output, loss if last else None

    case, gradients = ParityCase(micro_batches=MICRO_BATCHES, pp=2), []
    for frozen in ((), ("embedding", "layers")):
        cad, model, step = small_cases.ready(case, frozen=frozen)
        cad.forward_backward(step, forward_step, model)
        gradients += [each.main_grad.clone() for name, each in model.named_parameters() if "output" in name]
    with torch.no_grad():
        cad.forward_backward(step, token_losses_step, model)
    gradients += [each.main_grad.clone() for name, each in model.named_parameters() if "output" in name]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # refused before a stage waits for another
        assert "inside of torch.autocast" in _refused(cad.forward_backward, step, forward_step, model)
    said = _refused(run_schedule, model, step.batches, summed_loss_step)

    def of_one_element(batches: Any, model: Any) -> Any:
        output, loss_function = summed_loss_step(batches, model)

        def with_an_axis(output: torch.Tensor) -> tuple[Any, ...]:
            total, *others = loss_function(output)
            return total[None], *others

        return output, with_an_axis

    # On whole documents the stages run Megatron's 1F1B, which frees what a stage returned.
    cad, model, step = small_cases.ready(case, disaggregate=False)
    for each_step in (summed_loss_step, of_one_element):
        cad.forward_backward(step, each_step, model)
        gradients += [each.main_grad.clone() for name, each in model.named_parameters() if "output" in name]
    return said, gradients


@pytest.fixture(scope="module")
def stages() -> list[tuple[str, list[torch.Tensor]]]:
    return run_ranks(2, _in_stages)


def test_megatrons_pipeline_schedule_is_refused_by_every_stage(stages: list[tuple[str, list[torch.Tensor]]]) -> None:
    assert len({said for said, _ in stages}) == 1
    assert stages[0][0].endswith("run the model with CAD.forward_backward.")


def test_a_stage_of_frozen_weights_takes_part_in_backward(stages: list[tuple[str, list[torch.Tensor]]]) -> None:
    (_, first), (_, (learned, with_frozen, *_)) = stages
    assert not first and learned.norm() > 0 and torch.equal(learned, with_frozen)


def test_stages_train_although_the_caller_switched_gradients_off(stages: list[tuple[str, list[torch.Tensor]]]) -> None:
    learned, _, switched_off, *_ = stages[1][1]
    torch.testing.assert_close(switched_off, learned)


def test_a_stage_may_return_a_loss_of_one_element(stages: list[tuple[str, list[torch.Tensor]]]) -> None:
    *_, scalar, one_element = stages[1][1]
    assert scalar.norm() > 0 and torch.equal(scalar, one_element)
