"""Disaggregated training against unmodified megatron-core, on gloo ranks: the promise that everything else rests on.

The suite holds every mechanism in one layout of ranks; ``distca parity`` runs all modes and edges in every layout.
"""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from distca.plan import Links, PlanOptions, area_cost, plan_step, route

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PAIRS = ((0, 1), (0, 2), (1, 2))


def _suite():
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca.parity import suite as parity_suite

    return parity_suite


def _paired_modes(tp):
    """The cases of all modes in which every two settings meet with all their values that meet there."""
    from distca.parity.suite import all_modes

    def is_odd(case):
        return (case.ping_pong + (case.backward == "resend") + (case.recompute == "all")) % 2 == 1

    return [case for case in all_modes(tp) if case.recompute == "mlp" or is_odd(case)]


def _float32(tp, name, numbers=slice(None), per_node=0):
    """Of the cases with plans of the planner, those with some numbers."""
    suite = _suite()
    cases = {"paired_modes": _paired_modes, "edge_cases": suite.edge_cases, "model_cases": suite.model_cases}[name](tp)
    cases = [replace(case, ranks_per_node=per_node) for case in cases if case.scheduler == "real"][numbers]
    return [
        (case, figures, suite.FLOAT32_TOLERANCE)
        for case, figures in zip(cases, suite.float32_differences(cases, CPU), strict=True)
    ]


def _float64(tp, models, modes=slice(None), edges=slice(None)):
    suite = _suite()
    cases = _paired_modes(tp)[modes] + [case for case in suite.edge_cases(tp) if case.scheduler == "random"][edges]
    if models:
        cases = suite.model_cases(tp)
    return [
        (case, figures, suite.FLOAT64_TOLERANCE)
        for case, figures in zip(cases, suite.float64_errors(cases, CPU), strict=True)
    ]


def _model_cases(tp, exact, whole):
    """In float64 where that is asked for, and some in float32."""
    return [*(_float64(tp, True) if exact else ()), *_float32(tp, "model_cases", whole)]


def _losses_by_document(case, weights):
    """Per micro-batch, [documents] summed loss of each document, by the disaggregated model over all ranks, in float64,
    where the order of a few additions does not show."""
    import torch.distributed as dist

    from distca.data.batch import rank_batch
    from distca.parity.cases import case_documents
    from distca.parity.disaggregated import attached
    from megatron_patches.ranks.groups import server_pool_group

    cad, model = attached(case, torch.float32, CPU, "reference", weights)
    step, first = cad.plan_step(case_documents(case)), np.cumsum([0, *map(len, case.micro_batches)])
    results = torch.zeros(int(first[-1]), dtype=torch.float64)
    for batch, layouts, drawn in zip(step.batches, step.plan.layouts, step.plan.drawn, strict=True):
        owner = [np.full(case.micro_batches[m][d], first[m] + d) for m, d in drawn.tolist()]
        rows = rank_batch(owner, layouts, cad.rank, align=cad.options.align, chunks=cad.options.shares)
        with torch.no_grad():
            losses = model(batch.tokens, batch.positions, batch.attention, labels=batch.labels) * batch.loss_mask
        results.index_add_(0, torch.from_numpy(rows.tokens), losses.flatten().double())
    dist.all_reduce(results, group=server_pool_group())
    return list(results.split([len(each) for each in case.micro_batches]))


def _document_losses(changed):
    suite = _suite()
    base = suite.ParityCase(micro_batches=suite.LENGTHS, tp=2)
    _, weights = suite.unmodified.run_unmodified(base, torch.float32, CPU)
    return [_losses_by_document(replace(base, changed_document=where), weights) for where in [None, *changed]]


def _check(results):
    for case, figures, tolerance in results:
        assert max(figures.values()) <= tolerance, (case, figures)


@pytest.mark.parametrize("ranks,tp,per_node", [(1, 1, 0), (4, 1, 2), pytest.param(4, 2, 0, marks=pytest.mark.megatron)])
def test_loss_and_every_gradient_in_float32(worlds, ranks, tp, per_node):
    """On two nodes with ping-pong on and off, keep and resend, and nothing and everything recomputed."""
    _check(worlds.call(ranks, _float32, tp, "paired_modes", slice(1, 4) if per_node else slice(None), per_node)[0])


def test_every_two_settings_meet_in_the_paired_modes():
    from distca.parity.suite import all_modes

    def met(cases):
        settings = [(case.ping_pong, case.backward, case.recompute) for case in cases]
        return {(first, second, each[first], each[second]) for each in settings for first, second in PAIRS}

    assert met(_paired_modes(1)) == met(all_modes(1)) and len(_paired_modes(1)) < len(all_modes(1))


def test_rows_of_the_compared_documents_took_two_hops():
    from distca.parity.suite import LENGTHS

    links = Links(2)
    plan = plan_step(LENGTHS, PlanOptions(4, area_cost(4, 2, 8), nano_batches=2, links=links))
    assert any(route(each, 0, links).relay is not None for phase in plan.forward for each in phase.plans)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_compared_documents_changed_micro_batches(ranks):
    """The gradients above are those of documents dealt anew, the reference's of documents where they were given."""
    from distca.parity.suite import LENGTHS

    room = ranks * max(map(sum, LENGTHS))
    plan = plan_step(LENGTHS, PlanOptions(ranks, area_cost(4, 2, 8), nano_batches=2), room=[room] * len(LENGTHS))
    assert any((origin[:, 0] != number).any() for number, origin in enumerate(plan.drawn))


EVERY_SECOND, OTHERS = slice(0, None, 2), slice(1, None, 2)


@pytest.mark.parametrize(
    "numbers", [EVERY_SECOND, pytest.param(OTHERS, marks=pytest.mark.matrix)], ids=["suite", "further"]
)
def test_edge_cases_in_float32(worlds, numbers):
    """Under real plans; random ones are held in float64. In the suite, odd lengths, a document over all ranks, and
    ranks without tokens."""
    _check(worlds.call(4, _float32, 1, "edge_cases", numbers)[0])


@pytest.mark.parametrize(
    "modes,edges",
    [(slice(0, None, 5), EVERY_SECOND), pytest.param(slice(1, 5), OTHERS, marks=pytest.mark.matrix)],
    ids=["suite", "further"],
)
def test_block_in_float64(worlds, modes, edges):
    """In the suite with two modes that differ in all; in float32 all are."""
    _check(worlds.call(4, _float64, 2, False, modes, edges)[0])


@pytest.mark.parametrize(
    "exact,whole",
    [(True, slice(3)), pytest.param(False, slice(3, None), marks=pytest.mark.matrix)],
    ids=["suite", "further"],
)
def test_models_that_are_no_llama(worlds, exact, whole):
    """Blocks of all. Whole models where gradients of vectors are summed over tensor-parallel ranks."""
    _check(worlds.call(2, _model_cases, 2, exact, whole)[0])


def test_attention_does_not_leak_across_documents(worlds):
    """Changing one document's tokens leaves every other document's loss unchanged, bit for bit."""
    changed = [(0, 0), (0, 3), (1, 0)]
    before, *losses = worlds.call(4, _document_losses, changed)[0]
    for where, after in zip(changed, losses, strict=True):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            for document in range(len(old)):
                assert (old[document] != new[document]) == ((number, document) == where)
