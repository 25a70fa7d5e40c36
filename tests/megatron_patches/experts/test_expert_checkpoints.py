"""Checkpoints of models with experts, on gloo ranks."""

import itertools

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.megatron_patches.small_cases import on_cpu

pytestmark = pytest.mark.slow
RUNS = {
    True: ("sigmoid, bias, groups, scaling", [{"ep": 2}, {"ep": 1}]),
    False: ("eight experts a row, sigmoid, auxiliary loss, dense first layer", [{"ep": 2}, {"pp": 2}]),
}
"""Router, and layouts of two ranks, one after the other, with the distributed optimizer and the plain one."""


def _trained(router, distributed, ep=1, tp=1, pp=1):
    """The case, its CAD, its model in Megatron's DDP and its optimizer."""
    from distca.parity import disaggregated, experts, unmodified
    from distca.parity.expert_steps import Adam
    from megatron_patches.training.optimizer import build_optimizer

    case = experts.expert_case(router, tp=tp, pp=pp, ep=ep)
    weights = {name: p.detach() for name, p in unmodified.unmodified_model(case, torch.float32).named_parameters()}
    cad, model = disaggregated.attached(case, torch.float32, torch.device("cpu"), "reference", weights)
    ddp = cad.data_parallel(model, distributed_optimizer=distributed)
    return case, cad, ddp, build_optimizer(ddp, Adam(distributed), 4, 1, torch.float32)


def _step(case, cad, ddp, optimizer):
    from distca.parity.cases import case_documents
    from megatron_patches.training.training_step import summed_loss_step

    cad.forward_backward(cad.plan_step(case_documents(case)), summed_loss_step, ddp)
    return optimizer.step()[0]


def _state(ddp):
    """Weights and biases of experts of this rank."""
    return {name: value.clone() for name, value in ddp.module.state_dict().items() if torch.is_tensor(value)}


def _through_layouts(folder, router, distributed, layouts):
    """Tensors of the checkpoints that are saved by the first layout, and by each after it has loaded the last one; and
    whether the first one goes on from its own as if it had not stopped."""
    from megatron.core import dist_checkpointing

    from megatron_patches.checkpoint.save_load import load_checkpoint, save_checkpoint

    paths = [folder / f"{distributed}-{number}" for number in range(len(layouts))]
    for path in paths:
        path.mkdir(exist_ok=True)
    first = _trained(router, distributed, **layouts[0])
    for _ in range(2):
        _step(*first)
    save_checkpoint(paths[0], *first[2:], {"step": 2})()
    norm, through = _step(*first), _state(first[2])
    load_checkpoint(paths[0], *first[2:])
    resumed = _step(*first) == norm and all(torch.equal(each, through[name]) for name, each in _state(first[2]).items())
    for before, after, layout in zip(paths, paths[1:], layouts[1:], strict=False):
        *_, ddp, optimizer = _trained(router, distributed, **layout)
        extra = load_checkpoint(before, ddp, optimizer)
        save_checkpoint(after, ddp, optimizer, extra)()
    saved = [dist_checkpointing.load_plain_tensors(str(path)) for path in paths]
    return resumed, [{name: each for name, each in state.items() if torch.is_tensor(each)} for state in saved]


def _all_runs(folder, runs):
    on_cpu()
    return {
        distributed: _through_layouts(folder, router, distributed, layouts)
        for distributed, (router, layouts) in runs.items()
    }


def test_checkpoints_go_on_with_other_numbers_of_experts_ranks(tmp_path):
    answers = run_ranks(2, _all_runs, tmp_path, RUNS)
    assert all(resumed for answer in answers for resumed, _ in answer.values())
    for _, saved in answers[0].values():
        assert any("optimizer.state.exp_avg.decoder.layers" in key and "experts" in key for key in saved[0])
        for one, other in itertools.pairwise(saved):
            assert one.keys() == other.keys()
            assert [key for key, value in one.items() if not torch.equal(value, other[key])] == []
    assert any("expert_bias" in key for key in answers[0][True][1][0])
