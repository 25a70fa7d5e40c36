"""Models with experts against unmodified megatron-core, on gloo ranks."""

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.megatron_patches.small_cases import on_cpu

pytestmark = pytest.mark.slow


def _differences(worlds):
    on_cpu()
    from distca.parity import experts

    found = []
    for tp, pp, ep, deal, picked in worlds:
        cases = [experts.expert_cases(tp, pp, ep, deal=deal)[number] for number in picked]
        found += zip(cases, experts.expert_differences(cases, torch.device("cpu")), strict=True)
    return found


def _on_two_ranks(worlds, router, steps):
    """Differences, also after steps of the optimizer, and weights as drawn on one rank and on two."""
    from distca.parity.expert_steps import step_differences
    from distca.parity.experts import expert_case, expert_differences

    found, cases, cpu = _differences(worlds), [expert_case(router, ep=2)], torch.device("cpu")
    found += zip(cases, expert_differences(cases, cpu, disaggregate=False), strict=True)
    found += zip(cases, step_differences(cases, cpu, distributed=True, steps=steps), strict=True)
    return found, [_drawn(ep) for ep in (1, 2)], _evaluated(cases[0])


def _evaluated(case):
    """Losses without and with backward; loads and biases that are left by the former."""
    from distca.parity import disaggregated, experts, unmodified
    from distca.parity.cases import case_documents
    from megatron_patches.training.training_step import summed_loss_step

    weights = {name: p.detach() for name, p in unmodified.unmodified_model(case, torch.float32).named_parameters()}
    cad, model = disaggregated.attached(case, torch.float32, torch.device("cpu"), "reference", weights)
    ddp = cad.data_parallel(model)
    step, before = cad.plan_step(case_documents(case)), experts.biases_of(model)
    evaluated = cad.forward_backward(step, summed_loss_step, ddp, forward_only=True)
    left = cad.expert_loads(ddp), experts.worst(experts.biases_of(model), before)
    trained = cad.forward_backward(cad.plan_step(case_documents(case)), summed_loss_step, ddp)
    return evaluated, trained, left, [load.rows_E for load in cad.expert_loads(ddp).values()]


def _drawn(ep):
    """Weights of a new model by their names in the whole model."""
    from distca.parity import experts
    from distca.parity.cases import config_of
    from megatron_patches.layers.block import block_spec
    from megatron_patches.model.gpt import build_gpt
    from megatron_patches.model.whole_parameters import names_in_whole
    from megatron_patches.ranks.groups import initialize_model_parallel

    case = experts.expert_case("auxiliary loss, shared expert", ep=ep)
    initialize_model_parallel(1, 1, case.seed, ep)
    config = config_of(case, torch.float32)
    torch.manual_seed(case.seed)
    gpt = build_gpt(case.model, case.shape.vocabulary, config, block_spec(config), case.rotary_percent)
    names = names_in_whole(gpt, 0, tied=False)
    return {names[name]: weight.detach() for name, weight in gpt.named_parameters()}


def test_losses_gradients_and_steps_are_unmodified_megatrons_and_every_expert_is_drawn():
    answers = run_ranks(2, _on_two_ranks, [(1, 1, 2, True, (4, 6, 7))], "sigmoid, bias, groups, scaling", 2)
    for case, off in answers[0][0]:
        assert max(off.values()) <= 1e-5, (case, off)
    whole = answers[0][1][0]
    spread = answers[0][1][1] | answers[1][1][1]
    assert whole.keys() == spread.keys() > answers[0][1][1].keys()
    assert all(torch.equal(weight, spread[name]) for name, weight in whole.items())
    for *_, (evaluated, trained, left, loads) in answers:
        assert torch.equal(torch.stack(evaluated), torch.stack(trained))
        assert left == ({}, 0.0), "evaluation counts nothing"
        assert len(loads) == 2 and {float(rows.sum()) for rows in loads} == {2.0 * 105}


def test_losses_and_gradients_with_tensor_parallelism_and_stages_are_unmodified_megatrons():
    for case, off in run_ranks(4, _differences, [(2, 2, 2, False, (5,))])[0]:
        assert max(off.values()) <= 1e-5, (case, off)
