"""Experts on two GPUs that share them: at once as right as one after the other, also in whole runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.runs import keep_results, train_on_gpus
from tests.gpu.starts import Case, Starts
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu

RATIO = 1.1
"""Distance of experts at once from float32 over that of experts one after the other, both in bfloat16."""
ROWS = ([500, 0, 1, 1803], [0, 0, 2048, 0], [0, 301, 1, 0], [0, 0, 0, 0])
"""Rows of a rank's four experts."""
SETTINGS = {
    "model.experts.count": 8,
    "model.experts.topk": 2,
    "model.experts.ffn": 512,
    "model.experts.balance": 0.001,
    "parallel.ep": 2,
    "train.micro_batches": 2,
}
MODES: dict[str, dict[str, str]] = {
    "at once": {},
    "home": {"cad.enabled": "false"},
    "resend": {"cad.backward": "resend", "train.recompute": "mlp"},
    "recompute": {"train.recompute": "all"},
}
ALL_MODES = {"one by one": {"cad.enabled": "false"}} | MODES


def cases(folder: Path) -> dict[str, Case]:
    runs = [{"name": name, "output": folder} | SETTINGS | mode for name, mode in ALL_MODES.items()]
    return {
        test_experts_at_once_are_as_near_to_float32_as_one_after_the_other.__name__: Case(2, _errors, ("cuda",)),
        test_a_half_asks_its_device_once_in_the_forward_pass_of_a_layer_and_stops_it_nowhere.__name__: Case(
            2, _questions
        ),
        test_runs_agree_with_experts_one_after_the_other.__name__: Case(2, _train, (runs,)),
    }


@pytest.fixture
def found(request: pytest.FixtureRequest, starts: Starts) -> list[Any]:
    """What both ranks found for a test."""
    return starts.result(request.node.name)


def _found(experts: Any, rows: list[int], compute: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output, and gradients of rows, probabilities and all weights of a product."""
    generator = torch.Generator().manual_seed(sum(rows))
    weight = next(experts.parameters())
    count, hidden = sum(rows), experts.config.hidden_size
    drawn = (torch.randn(*shape, generator=generator) for shape in ((count, hidden), (count,), (count, hidden)))
    # All types compute with the same numbers.
    x, probs, d_out = (each.bfloat16().to(weight.device, weight.dtype) for each in drawn)
    for name in ("linear_fc1", "linear_fc2"):
        weights = [getattr(each, name).weight for each in experts.local_experts]
        # Gradients lie as in Megatron's DDP, where one kernel adds those of all experts.
        memory = torch.zeros(len(weights), *weights[0].shape, dtype=torch.float32, device=weight.device)
        for each, place in zip(weights, memory, strict=True):
            each.grad, each.grad_added_to_main_grad, each.main_grad = None, False, place
    out = compute(x.requires_grad_(), probs.requires_grad_())
    out.backward(d_out)
    found = {"output": out.detach(), "rows": x.grad, "probabilities": probs.grad}
    for name in ("linear_fc1", "linear_fc2"):
        weights = [getattr(each, name).weight for each in experts.local_experts]
        found[name] = torch.stack([w.main_grad if w.grad_added_to_main_grad else w.grad.float() for w in weights])
    return found


def _errors(kind: str) -> dict[str, list[dict[str, float]]]:
    """By way, for each of ROWS, distances from float32."""
    warnings.filterwarnings("ignore")
    from distca.ops.grouped_linear import Groups, is_grouped
    from distca.parity import disaggregated, unmodified
    from distca.parity.experts import expert_case
    from distca.parity.suite import GPU_LENGTHS, GPU_SHAPE
    from megatron_patches.experts.grouped import FoundExperts, computed

    device = torch.device(kind)
    case = expert_case("softmax behind the choice", micro_batches=GPU_LENGTHS, shape=GPU_SHAPE, ep=2)
    case = replace(case, config=case.config | {"moe_ffn_hidden_size": 384})
    weights = {name: p.detach() for name, p in unmodified.unmodified_model(case, torch.float32).named_parameters()}
    _, model = disaggregated.attached(case, torch.bfloat16, device, "auto", weights)
    experts = model.decoder.layers[0].mlp.experts
    assert len(experts.local_experts) == 4, "two ranks share eight"
    weight = experts.local_experts[0].linear_fc1.weight
    # Elsewhere experts come one after the other, and there is nothing to compare.
    if kind == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        assert is_grouped(weight, weight)

    def by_turns(x: torch.Tensor, probs: torch.Tensor, rows: list[int]) -> torch.Tensor:
        output: torch.Tensor = experts(x, torch.tensor(rows), probs)[0]
        return output

    def at_once(x: torch.Tensor, probs: torch.Tensor, rows: list[int]) -> torch.Tensor:
        first = [expert.linear_fc1.weight for expert in experts.local_experts]
        second = [expert.linear_fc2.weight for expert in experts.local_experts]
        groups = Groups(rows, torch.tensor(rows).cumsum(0).int().to(device))
        return computed(FoundExperts(experts, (first, second), None, last_first=False), groups, x, probs)

    ways = {"at once": at_once, "one after the other": by_turns}
    found = {
        way: [_found(experts, rows, partial(compute, rows=rows)) for rows in ROWS] for way, compute in ways.items()
    }
    experts.float()
    exact = [_found(experts, rows, partial(by_turns, rows=rows)) for rows in ROWS]
    return {
        way: [{name: _distance(a[name], b[name]) for name in a} for a, b in zip(each, exact, strict=True)]
        for way, each in found.items()
    }


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape and bool(found.isfinite().all())
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def test_experts_at_once_are_as_near_to_float32_as_one_after_the_other(found: list[Any]) -> None:
    for rank in found:
        for rows, ours, theirs in zip(ROWS, rank["at once"], rank["one after the other"], strict=True):
            for name, error in ours.items():
                assert error <= RATIO * theirs[name] + 1e-7, (rows, name, error, theirs[name])


def _questions() -> dict[str, tuple[int, list[str]]]:
    """Questions that a step asked its device, by what is recomputed: how many of numbers of rows, which the device
    does not stop for, and the places where the host waited."""
    from distca.parity import disaggregated, unmodified
    from distca.parity.cases import case_documents
    from distca.parity.experts import expert_case
    from distca.parity.suite import GPU_LENGTHS, GPU_SHAPE
    from megatron_patches.experts import dispatch
    from megatron_patches.training.training_step import summed_loss_step

    device, found = torch.device("cuda", torch.cuda.current_device()), {}
    own, asked = dispatch.asked, []
    dispatch.asked = lambda counts: asked.append(1) or own(counts)
    for recompute in ("none", "mlp", "all"):
        case = expert_case(
            "auxiliary loss, shared expert", micro_batches=GPU_LENGTHS, shape=GPU_SHAPE, ep=2, recompute=recompute
        )
        weights = {name: p.detach() for name, p in unmodified.unmodified_model(case, torch.float32).named_parameters()}
        cad, model = disaggregated.attached(case, torch.bfloat16, device, "auto", weights)
        ddp = cad.data_parallel(model)
        cad.forward_backward(cad.plan_step(case_documents(case)), summed_loss_step, ddp)  # compiles kernels
        step = cad.plan_step(case_documents(case))
        ddp.weights_gathered = True  # no optimizer runs here, which says so; else weights are compared
        torch.cuda.synchronize()
        asked.clear()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            cad.forward_backward(step, summed_loss_step, ddp)
            torch.cuda.set_sync_debug_mode("default")
        waits = [f"{each.filename}:{each.lineno}" for each in heard if "synchronizing CUDA" in str(each.message)]
        found[recompute] = len(asked), waits
    dispatch.asked = own
    return found


def test_a_half_asks_its_device_once_in_the_forward_pass_of_a_layer_and_stops_it_nowhere(found: list[Any]) -> None:
    for rank in found:
        for recompute, (asked, waits) in rank.items():
            layers, halves = 2, 2  # of one micro-batch
            assert asked == layers * halves, recompute
            assert not waits, recompute


def _train(runs: list[dict[str, Any]]) -> None:
    """Train the first run with experts one after the other, and the others as users do."""
    from megatron_patches.experts import grouped

    own, grouped._is_bare = grouped._is_bare, lambda _: False
    train_on_gpus(runs[:1])
    grouped._is_bare = own
    train_on_gpus(runs[1:])


def test_runs_agree_with_experts_one_after_the_other(starts: Starts, found: list[Any]) -> None:
    folder = starts.folder
    losses, norms = (steps_of(folder / "one by one", key) for key in ("loss", "grad_norm"))
    keep_results("experts", 2, {name: steps_of(folder / name, "loss") for name in ALL_MODES})
    assert list(losses) == [1, 2, 3, 4]
    for name in MODES:
        assert steps_of(folder / name, "loss") == pytest.approx(losses, rel=5e-4)
        assert steps_of(folder / name, "grad_norm") == pytest.approx(norms, rel=1e-2)
