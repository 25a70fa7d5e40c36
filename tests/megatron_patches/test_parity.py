"""Disaggregated training against unmodified megatron-core, on gloo ranks: the promise that everything else rests on."""

import warnings
from itertools import product

import pytest
import torch

from distca.attention.reference import ReferenceKernel
from distca.testing.ranks import run_ranks

FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-12
CPU = torch.device("cpu")

LENGTHS = ((13, 7, 1, 29, 3), (50, 2))
EDGES = {
    "odd lengths, several micro-batches": ((3, 5, 7, 11, 31), (17, 19), (23,)),
    "length 1": ((1, 1, 2, 1, 1),),
    "a document over all ranks": ((97,), (60, 1)),
    "300 documents": (tuple(1 + (7 * n) % 5 for n in range(300)),),
    "ranks without tokens": ((2,), (1, 2)),
}


def _parity():
    warnings.filterwarnings("ignore")
    from megatron_patches.cpu import use_cpu

    use_cpu()
    from megatron_patches import parity

    return parity


def _differences(settings):
    parity = _parity()
    results = []
    for changes in settings:
        case = parity.ParityCase(**changes)
        reference, weights = parity.run_stock(case, torch.float32, CPU)
        candidate = parity.run_disaggregated(case, torch.float32, CPU, ReferenceKernel(), weights)
        results.append((changes, parity.difference(candidate, reference)))
    return results


def _block_errors(settings):
    parity = _parity()
    from megatron_patches import block_parity

    results = []
    for changes in settings:
        case = parity.ParityCase(**changes)
        reference, weights = block_parity.block_stock(case, torch.float64, CPU)
        candidate = block_parity.block_disaggregated(case, torch.float64, CPU, ReferenceKernel(), weights)
        results.append((changes, candidate.error(reference)))
    return results


def _document_losses(settings):
    parity = _parity()
    case = parity.ParityCase(**settings[0])
    _, weights = parity.run_stock(case, torch.float32, CPU)
    return [
        parity.document_losses(parity.ParityCase(**changes), torch.float32, CPU, ReferenceKernel(), weights)
        for changes in settings
    ]


def _all_modes(tp, **rest):
    return [
        {"tp": tp, "ping_pong": ping_pong, "backward": backward, "recompute": recompute, **rest}
        for ping_pong, backward, recompute in product((True, False), ("keep", "resend"), (False, True))
    ]


@pytest.mark.parametrize("ranks,tp", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_loss_and_every_gradient_in_float32(ranks, tp):
    for changes, difference in run_ranks(ranks, _differences, _all_modes(tp, micro_batches=LENGTHS))[0]:
        assert max(difference.loss, difference.gradient) <= FLOAT32_TOLERANCE, (changes, difference)


@pytest.mark.parametrize("tp", [1, 2])
def test_edge_cases_in_float32(tp):
    settings = [
        {"tp": tp, "micro_batches": lengths, "backward": backward, "recompute": backward == "keep", "scheduler": scheduler}
        for lengths, (backward, scheduler) in product(EDGES.values(), (("keep", "random"), ("resend", "real")))
    ]
    for changes, difference in run_ranks(4, _differences, settings)[0]:
        assert max(difference.loss, difference.gradient) <= FLOAT32_TOLERANCE, (changes, difference)


@pytest.mark.parametrize("ranks,tp", [(2, 1), (4, 2)])
def test_block_in_float64(ranks, tp):
    settings = _all_modes(tp, micro_batches=LENGTHS) + [
        {"tp": tp, "micro_batches": lengths, "scheduler": "random", "seed": seed}
        for seed, lengths in enumerate(EDGES.values())
    ]
    for changes, errors in run_ranks(ranks, _block_errors, settings)[0]:
        assert max(errors.values()) <= FLOAT64_TOLERANCE, (changes, errors)


def test_attention_does_not_leak_across_documents():
    """Changing one document's tokens leaves every other document's loss unchanged, bit for bit."""
    base = {"micro_batches": LENGTHS, "tp": 2}
    changed = [(0, 0), (0, 3), (1, 0)]
    losses = run_ranks(4, _document_losses, [base] + [{**base, "changed_document": where} for where in changed])[0]
    for (micro_batch, document), after in zip(changed, losses[1:], strict=True):
        for number, (old, new) in enumerate(zip(losses[0], after, strict=True)):
            for other in range(len(old)):
                if (number, other) == (micro_batch, document):
                    assert old[other] != new[other]
                else:
                    assert old[other] == new[other]
