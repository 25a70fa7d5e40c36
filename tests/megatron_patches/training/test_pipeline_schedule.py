"""Pipelines with idle stages serving, on gloo ranks, against unmodified megatron-core on one rank: float32."""

import warnings

import pytest
import torch

from distca.plan import PlanOptions, area_cost, plan_step
from distca.testing.ranks import run_ranks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MICRO_BATCHES = ((13, 7, 1, 29, 3), (50, 2), (5, 5, 40), (1,), (61,), (8, 9, 10))


def _differences(tp, pp, settings, layers=4):
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca.parity import disaggregated, outcome, unmodified
    from distca.parity.cases import ParityCase, ParityShape

    shape = ParityShape(layers=layers)
    cases = [ParityCase(tp=tp, pp=pp, shape=shape, **changes) for changes in settings]
    references = [unmodified.run_unmodified(case, torch.float32, CPU) for case in cases]
    results = []
    for number, (case, (reference, weights)) in enumerate(zip(cases, references, strict=True)):
        summed = number % 2 == 0
        candidate = disaggregated.run_disaggregated(case, torch.float32, CPU, "reference", weights, summed_loss=summed)
        results.append((case, outcome.difference(candidate, reference)))
    return results


def _settings(counts, per_node=0):
    """Cases of so many micro-batches, each unlike the others in what else there is."""
    return [
        {
            "ranks_per_node": per_node,
            "micro_batches": MICRO_BATCHES[:count],
            "ping_pong": count % 2 == 0,
            "recompute": ("all", "none", "mlp")[count % 3],
            "scheduler": ("real", "random")[count % 2],
            "tie_embeddings": count > 3,
        }
        for count in counts
    ]


LAYOUTS = [
    pytest.param(2, 1, 2, 0, (1, 2, 4, 6), marks=pytest.mark.megatron),
    (4, 1, 4, 2, (2, 4, 5)),
    (4, 2, 2, 0, (5,)),
    pytest.param(2, 1, 2, 0, (3, 5), marks=pytest.mark.matrix),
    pytest.param(8, 2, 2, 0, (5,), marks=pytest.mark.matrix),
]
"""Ranks, tensor-parallel ranks, stages, ranks of a node, and counts of micro-batches: of two stages those below, at and
above twice the stages, of four those below, at and above the stages, each with a recomputation of its own."""


@pytest.mark.parametrize("ranks,tp,pp,per_node,counts", LAYOUTS)
def test_loss_and_every_gradient(ranks, tp, pp, per_node, counts):
    settings = _settings(counts, per_node)
    for case, difference in run_ranks(ranks, _differences, tp, pp, settings)[0]:
        assert max(difference.loss, difference.gradient) <= 1e-5, (case, difference)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_the_compared_documents_changed_micro_batches(count):
    """The gradients above are those of documents dealt anew, the reference's of documents where they were given."""
    given = MICRO_BATCHES[:count]
    options = PlanOptions(2, area_cost(4, 2, 8), stages=2, nano_batches=2, resend=True)
    plan = plan_step(given, options, room=[2 * max(map(sum, given))] * count)
    assert any((origin[:, 0] != number).any() for number, origin in enumerate(plan.drawn))


def _over_little_memory(capacities):
    """By capacity: how far a step whose rows land in so many bytes is from the reference, and how many exchanges gloo
    took."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca.parity import disaggregated, outcome, unmodified
    from distca.parity.cases import ParityCase
    from distca.transport.collective import CollectiveTransport
    from distca.transport.nvshmem.transport import OneSidedTransport
    from megatron_patches import pool
    from tests.transport.nvshmem import host_fabric

    case = ParityCase(micro_batches=MICRO_BATCHES[:3], pp=2)
    reference, weights = unmodified.run_unmodified(case, torch.float32, CPU)
    answers = []
    for capacity in capacities:
        made = []

        def transport(name, group, buffer_gb, waits_at_once, capacity=capacity, made=made):
            made.append(OneSidedTransport(host_fabric.HostFabric(capacity), "host", CollectiveTransport(group)))
            return made[0]

        pool.choose_transport = transport
        candidate = disaggregated.run_disaggregated(case, torch.float32, CPU, "reference", weights)
        answers.append((outcome.difference(candidate, reference), made[0].fallback_exchanges))
    return answers


@pytest.mark.parametrize("capacities", [(16_000, 1 << 20), pytest.param((12_000,), marks=pytest.mark.matrix)])
def test_idle_stages_and_busy_ones_send_the_same_exchanges_the_other_way(capacities):
    by_rank = run_ranks(4, _over_little_memory, capacities)
    for answers in by_rank:
        for capacity, (difference, spared), (_, on_first) in zip(capacities, answers, by_rank[0], strict=True):
            assert max(difference.loss, difference.gradient) <= 1e-5
            assert spared == on_first and (spared > 0) == (capacity < 1 << 20)


SMALL = {"layers": 2, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2, "vocabulary": 64}
BATCHES = {"source": "mix", "path": "pretrain", "vocabulary": 64, "context_length": 128, "tokens_per_rank": 128}


def _left_behind():
    """Of a recorded step and of a validation: micro-batches whose tensors a stage still has and its last input, whether
    a graph was built in the forward phases, and hooks that are left."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca.train.config.cli import parse_run_config
    from megatron_patches.training import pipeline_schedule
    from tests.train.small_runs import StepByStep

    settings = {f"model.{name}": value for name, value in SMALL.items()}
    settings |= {f"data.{name}": value for name, value in BATCHES.items()}
    settings |= {"data.whole_documents": "true", "data.validation_fraction": 0}
    settings |= {"parallel.pp": 2, "train.micro_batches": 3}
    run = StepByStep(parse_run_config([text for name, value in settings.items() for text in (f"--{name}", str(value))]))
    assert not run.trainer.model.ddp_config.overlap_grad_reduce, "stages do not end with the same micro-batch"
    step, stages, graphs = run.step(), [], []

    class Noted(pipeline_schedule._Stage):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            stages.append(self)

        def _forward(self, *arguments):
            return without_span(super()._forward(*arguments))

        def _backward(self, *arguments):
            return without_span(super()._backward(*arguments))

    def without_span(result):
        assert run.trainer.cad.pool.timeline._open is None, "a wait that follows would count as computation"
        return result

    pipeline_schedule._Stage = Noted
    decoder = run.trainer.model.module.decoder
    decoder.register_forward_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    run.trainer.cad.pool.timeline.start_recording()
    for forward_only in (False, True):
        run.run(step, forward_only=forward_only)
    left = [len(stage._inputs) + len(stage._outputs) for stage in stages] + [decoder.input_tensor]
    hooks = len(decoder._forward_hooks)
    run.close()
    return left, graphs, hooks


def test_stages_keep_nothing_and_validation_builds_no_graph():
    for left, graphs, hooks in run_ranks(2, _left_behind):
        assert left == [0, 0, None] and hooks == 1
        assert graphs == [True] * 3 + [False] * 3
