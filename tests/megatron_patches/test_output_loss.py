"""The fused output layer and loss against megatron-core's own, in float64, over tensor-parallel ranks."""

import warnings

import pytest
import torch

from distca.testing.ranks import run_ranks
from distca.testing.reference_attention import relative_error

ROWS, HIDDEN, VOCABULARY, LOGIT = 38, 12, 28, 8


def _data(rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    return hidden, weight, labels, torch.rand(rows, generator=generator) < 0.7


def _expected(rows=ROWS, upstream=1.0):
    hidden, weight, labels, mask = _data(rows)
    hidden.requires_grad_(), weight.requires_grad_()
    losses = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    loss = (losses * mask).sum()
    (loss * upstream).backward()
    return loss.detach(), hidden.grad, weight.grad


def _fused(sequence_parallel, rows, chunk_rows, upstream, dtype):
    """This rank's loss, gradient of its hidden rows and of its weight's rows."""
    import torch.distributed as dist

    from megatron_patches.output_loss import VocabularyShards, output_loss

    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight, labels, mask = _data(rows)
    hidden = hidden.chunk(ranks)[rank] if sequence_parallel and rows else hidden
    hidden = hidden.to(dtype).requires_grad_()
    weight = weight.chunk(ranks)[rank].to(dtype).requires_grad_()
    shards = VocabularyShards(dist.group.WORLD, sequence_parallel)
    logits_bytes = chunk_rows * len(weight) * weight.element_size()
    loss = output_loss(hidden, weight, labels, mask, shards, logits_bytes)
    (loss * upstream).backward()
    with torch.no_grad():
        assert torch.equal(output_loss(hidden, weight, labels, mask, shards, logits_bytes), loss)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    return loss.detach(), hidden.grad, weight.grad


def _all(cases):
    warnings.filterwarnings("ignore")
    return [_fused(*case) for case in cases]


@pytest.mark.parametrize("ranks,sequence_parallel", [(1, False), (2, False), (2, True)])
def test_loss_and_gradients_in_float64(ranks, sequence_parallel):
    cases = [
        (sequence_parallel, rows, chunk_rows, upstream, torch.float64)
        for rows, chunk_rows, upstream in ((ROWS, ROWS, 1.0), (ROWS, 7, -0.25), (ROWS, 2, 1.0), (2, 1, 3.0))
    ]
    everyone = run_ranks(ranks, _all, cases)
    for case, *outcomes in zip(cases, *everyone, strict=True):
        loss, d_hidden, d_weight = _expected(case[1], case[3])
        for outcome in outcomes:
            assert relative_error(outcome[0], loss) < 1e-14
            if not sequence_parallel:
                assert relative_error(outcome[1], d_hidden) < 1e-14
        if sequence_parallel:
            assert relative_error(torch.cat([outcome[1] for outcome in outcomes]), d_hidden) < 1e-14
        assert relative_error(torch.cat([outcome[2] for outcome in outcomes]), d_weight) < 1e-14


def test_no_rows_and_only_masked_rows():
    [(loss, d_hidden, d_weight)] = run_ranks(1, _all, [(False, 0, 4, 1.0, torch.float64)])[0]
    assert loss == 0 and d_hidden.shape == (0, HIDDEN) and not d_weight.any()


def test_products_are_added_without_rounding_them():
    from megatron_patches.output_loss import add_product

    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((28, 5), (5, 12)))
    total = torch.randn(28, 12, generator=generator)
    exact = total.double() + a.double() @ b.double()
    add_product(total, a, b)
    assert relative_error(total, exact) < 1e-6
