"""Stacks of recurrent layers and attention against unmodified Megatron-Core, one document at a time: GPTModel and
HybridModel. Blocks, and losses and gradients over pipeline stages, in float64; losses, gradients and three optimizer
steps in float32; in one start of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches.versions import has_gated_delta_net
from tests.parity.checkpoints import loaded_from_checkpoints
from tests.parity.test_parity import _check, _suite
from tests.testing.worlds import Worlds

CPU = torch.device("cpu")
STEPS = 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not has_gated_delta_net(),
        reason="Megatron-Core has had this gated delta net since 0.19",
    ),
]


Numbers = dict[str, tuple[int, ...]]
OF_SUITE: Numbers = {
    "GPTModel": (0, 1, 2, 3),
    "HybridModel": (1, 3, 4),
    "stages": (1, 3),
    "trained": (0,),
    "packed": (0,),
}
"""Of the cases of tests/parity/hybrid_cases.py; each setting of the others is there with other ones."""
FURTHER: Numbers = {"GPTModel": (), "HybridModel": (0, 2, 5), "stages": (0, 2, 4), "trained": (), "packed": (1,)}


def _on_four_ranks(numbers: Numbers) -> list[tuple[Any, dict[str, float], float]]:
    suite = _suite()
    from distca.parity import expert_steps, experts
    from tests.parity import hybrid_cases as hybrid
    from tests.parity.float32_casts import float32_casts_lifted

    all_cases, all_stacks, all_stages = hybrid.hybrid_cases(), hybrid.hybrid_model_cases(), hybrid.hybrid_stage_cases()
    cases = [all_cases[number] for number in numbers["GPTModel"]]
    stacks = [all_stacks[number] for number in numbers["HybridModel"]]
    with_experts = [case for case in stacks if case.config.get("num_moe_experts")]  # whose routers count in the model
    blocks = [*cases, *(case for case in stacks if case not in with_experts)]
    blocks.sort(key=lambda case: case.tp)  # groups of ranks are made once for all of a size
    stages = sorted((all_stages[number] for number in numbers["stages"]), key=lambda case: case.tp)
    with float32_casts_lifted():
        exact = [*suite.float64_errors(blocks, CPU), *suite.differences(stages, CPU, torch.float64)]
    blocks += stages
    compared = list(with_experts)
    trained = [replace(all_stacks[number], micro_batches=((13, 1, 9),)) for number in numbers["trained"]]
    found = suite.float32_differences(compared, CPU)
    found += expert_steps.step_differences(trained, CPU, distributed=True, steps=STEPS)
    packed = [replace(all_stacks[number], recompute=("none", "all")[number]) for number in numbers["packed"]]
    found += experts.expert_differences(packed, CPU, disaggregate=False)
    compared += trained + packed
    results = [(*each, suite.FLOAT64_TOLERANCE) for each in zip(blocks, exact, strict=True)]
    return results + [(*each, suite.FLOAT32_TOLERANCE) for each in zip(compared, found, strict=True)]


def _llama_as_both() -> float:
    """How far losses and gradients of a LLaMA as HybridModel are from those of the same as GPTModel."""
    _suite()
    from distca.parity import cases, disaggregated, unmodified

    gpt = cases.ParityCase(micro_batches=((13, 1, 29), (25,)), tp=2)
    stack = replace(gpt, shape=replace(gpt.shape, layers=4), pattern="*-*-")
    weights = {name: p.detach() for name, p in unmodified.unmodified_model(gpt, torch.float32).named_parameters()}
    renamed = {name: _name_in_stack(name) for name in weights}
    one = disaggregated.run_disaggregated(gpt, torch.float32, CPU, "reference", weights)
    held = {renamed[name]: weight for name, weight in weights.items()}
    other = disaggregated.run_disaggregated(stack, torch.float32, CPU, "reference", held)
    assert other.gradients.keys() == held.keys()
    _refuses_hooks_at_home(stack, held)
    apart = [(other.gradients[renamed[name]] - each).norm() / each.norm() for name, each in one.gradients.items()]
    return max(abs(one.loss - other.loss), *map(float, apart))


def _refuses_hooks_at_home(stack: Any, weights: dict[str, torch.Tensor]) -> None:
    """A HybridModel's layers are never called where attention stays at home, but core attention is. A model of other
    options is refused."""
    from distca.errors import SupportError
    from distca.parity import disaggregated
    from megatron_patches.model.gpt import build_hybrid
    from megatron_patches.model.model_options import ModelOptions
    from megatron_patches.support.attached import check_as_attached
    from megatron_patches.support.hybrid_model import check_hybrid_model

    cad, model = disaggregated.attached(stack, torch.float32, CPU, "reference", weights, disaggregate=False)
    model.decoder.layers[0].self_attention.core_attention.register_forward_hook(lambda *_: None)
    check_as_attached(model, cad.pool)
    model.decoder.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(SupportError, match=r"decoder\.layers\.0 has a hook, which would never run"):
        check_as_attached(model, cad.pool)
    other = build_hybrid(stack.shape.vocabulary, cad.config, cad.hybrid_stack_spec(), stack.pattern)
    check_hybrid_model(other, stack.pattern, ModelOptions())
    with pytest.raises(SupportError, match=r"decoder\.layers\.0 was built with other model options than CAD has"):
        check_hybrid_model(other, stack.pattern, ModelOptions(step_min=0.1))


def _name_in_stack(name: str) -> str:
    """A GPTModel's parameter in the HybridModel with its MLPs as layers of their own."""
    parts = name.replace("final_layernorm", "final_norm").split(".")
    if "layers" in parts:
        parts[2] = str(2 * int(parts[2]) + (parts[3] in ("mlp", "pre_mlp_layernorm")))
    return ".".join(parts)


def _on_two_ranks(path: Path) -> tuple[list[float], float]:
    llama = _llama_as_both()
    from tests.parity import hybrid_cases as hybrid

    saved = [hybrid.hybrid_cases()[0], *(hybrid.hybrid_model_cases()[number] for number in (0, 3))]
    saved += [replace(hybrid.hybrid_stage_cases()[number], tp=1) for number in (0, 3)]
    return loaded_from_checkpoints(saved, path), llama


@pytest.mark.parametrize(
    "numbers", [OF_SUITE, pytest.param(FURTHER, marks=pytest.mark.matrix)], ids=["suite", "further"]
)
def test_blocks_and_stages_in_float64_and_whole_models_in_float32(worlds: Worlds, numbers: Numbers) -> None:
    results = worlds.call(4, _on_four_ranks, numbers)[0]
    assert len(results) == sum(map(len, numbers.values()))
    _check(results)


def test_every_case_is_in_the_suite_or_among_the_further_ones() -> None:
    from tests.parity import hybrid_cases as hybrid

    counts = {
        "GPTModel": len(hybrid.hybrid_cases()),
        "HybridModel": len(hybrid.hybrid_model_cases()),
        "stages": len(hybrid.hybrid_stage_cases()),
        "trained": 1,
        "packed": 2,
    }
    for name, count in counts.items():
        assert sorted(OF_SUITE[name] + FURTHER[name]) == list(range(count)), name


def test_checkpoints_and_a_llama_as_hybrid_model(worlds: Worlds, tmp_path: Path) -> None:
    differences, llama = worlds.call(2, _on_two_ranks, tmp_path)[0]
    assert differences == [0.0] * 5
    assert llama <= 1e-6
