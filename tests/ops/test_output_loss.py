"""The fused output layer and loss against megatron-core's own, in float64, over tensor-parallel ranks."""

import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch

from distca.testing.ranks import run_ranks
from distca.testing.reference_attention import relative_error

ROWS, HIDDEN, VOCABULARY = 38, 12, 28


def _data(rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    return hidden, weight, labels, torch.rand(rows, generator=generator) < 0.7


def _expected(rows=ROWS, upstream=1.0, multiplier=1.0, softcap=0.0):
    hidden, weight, labels, mask = _data(rows)
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.t() * multiplier
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    loss = (losses * mask).sum()
    (loss * upstream).backward()
    return loss.detach(), hidden.grad, weight.grad


def _fused(sequence_parallel, rows, chunk_rows, upstream, dtype, by_row=True, transform=(1.0, 0.0)):
    """This rank's loss, gradient of its hidden rows and of its weight's rows."""
    import torch.distributed as dist

    from distca.ops.logits import LogitTransform
    from distca.ops.output_loss import VocabularyShards, output_loss

    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight, labels, mask = _data(rows)
    hidden = hidden.chunk(ranks)[rank] if sequence_parallel and rows else hidden
    hidden = hidden.to(dtype).requires_grad_()
    weight = weight.chunk(ranks)[rank].to(dtype).requires_grad_()
    shards = VocabularyShards(dist.group.WORLD, sequence_parallel)
    how = (shards, chunk_rows * len(weight) * weight.element_size(), LogitTransform(*transform))
    loss = output_loss(hidden, weight, labels, mask, *how)
    (loss * upstream).backward()
    if by_row and dtype == torch.float64 and rows:
        _check_log_probabilities(loss, hidden, weight, labels, mask * upstream, how)
    with torch.no_grad():
        assert torch.equal(output_loss(hidden, weight, labels, mask, *how), loss)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    return loss.detach(), hidden.grad, weight.grad


def _check_log_probabilities(loss, hidden, weight, labels, weights, how):
    """Row by row, weighed afterwards, they give the same loss and gradients."""
    from distca.ops.output_loss import log_probabilities

    own = [each.detach().requires_grad_() for each in (hidden, weight)]
    rows = log_probabilities(*own, labels, *how)
    assert rows.shape == labels.shape and (rows < 0).all()
    (-(rows * weights).sum()).backward()
    assert relative_error(-(rows.detach() * (weights != 0)).sum(), loss.detach()) < 1e-14
    for ours, theirs in zip(own, (hidden, weight), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 1e-14


def _all(cases):
    warnings.filterwarnings("ignore")
    return [_fused(*case) for case in cases]


@pytest.mark.parametrize("ranks,sequence_parallel", [(1, False), (2, False), (2, True)])
def test_loss_and_gradients_in_float64(ranks, sequence_parallel):
    cases = [
        (sequence_parallel, rows, chunk_rows, upstream, torch.float64)
        for rows, chunk_rows, upstream in ((ROWS, ROWS, 1.0), (ROWS, 7, -0.25), (ROWS, 2, 1.0), (2, 1, 3.0))
    ]
    transforms = ((0.125, 0.0), (1.0, 5.0), (0.7, 2.0))  # scaled, limited, and both
    cases += [(sequence_parallel, ROWS, 7, 1.5, torch.float64, True, transform) for transform in transforms]
    everyone = run_ranks(ranks, _all, cases)
    for case, *outcomes in zip(cases, *everyone, strict=True):
        loss, d_hidden, d_weight = _expected(case[1], case[3], *(case[6] if case[6:] else ()))
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
    from distca.ops.output_loss import add_product

    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((28, 5), (5, 12)))
    total = torch.randn(28, 12, generator=generator)
    exact = total.double() + a.double() @ b.double()
    add_product(total, a, b)
    assert relative_error(total, exact) < 1e-6


def _with_padding(padded, vocabulary, sequence_parallel):
    """This rank's loss and gradients where the weight has ``padded`` rows, of which those behind ``vocabulary`` are
    large and must not count."""
    import torch.distributed as dist

    from distca.ops.output_loss import VocabularyShards, output_loss

    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight, labels, mask = _data()
    weight = torch.nn.functional.pad(weight[:vocabulary], (0, 0, 0, padded - vocabulary), value=100.0)
    hidden = (hidden.chunk(ranks)[rank] if sequence_parallel else hidden).requires_grad_()
    weight = weight.chunk(ranks)[rank].requires_grad_()
    shards = VocabularyShards(dist.group.WORLD, sequence_parallel, vocabulary)
    loss = output_loss(hidden, weight, labels % vocabulary, mask, shards, 7 * len(weight) * 8)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize(
    "ranks,padded,vocabulary,sequence_parallel", [(1, 32, 27, False), (2, 28, 27, True), (2, 12, 5, False)]
)
def test_rows_of_padding_are_left_out_of_the_softmax(ranks, padded, vocabulary, sequence_parallel):
    """Also where a rank has nothing but padding."""
    outcomes = run_ranks(ranks, _with_padding, padded, vocabulary, sequence_parallel)
    hidden, weight, labels, mask = _data()
    hidden, weight = hidden.requires_grad_(), weight[:vocabulary].requires_grad_()
    losses = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels % vocabulary, reduction="none")
    (losses * mask).sum().backward()
    for outcome in outcomes:
        assert relative_error(outcome[0], (losses * mask).sum().detach()) < 1e-14
    d_hidden = torch.cat([outcome[1] for outcome in outcomes]) if sequence_parallel else outcomes[0][1]
    d_weight = torch.cat([outcome[2] for outcome in outcomes])
    assert relative_error(d_hidden, hidden.grad) < 1e-14
    assert relative_error(d_weight[:vocabulary], weight.grad) < 1e-14 and not d_weight[vocabulary:].any()


def _walk(sequence_parallel, chunk_rows):
    """Of one call with gradients and one without: bytes of every chunk's logits, whether logits of a chunk were still
    there when the next one began, and how many products were added to the weight's gradient."""
    from distca.ops import output_loss

    statistics, gathered, add = output_loss.row_statistics, output_loss._Chunks._gathered, output_loss.add_product
    sizes, logits, beside, products = [], [], [], []

    def noted(logits_NV, targets_N):
        sizes.append(logits_NV.numel() * logits_NV.element_size())
        logits.append(weakref.ref(logits_NV))
        return statistics(logits_NV, targets_N)

    def watched(chunks):
        for chunk in gathered(chunks):
            beside.append(any(each() is not None for each in logits))
            yield chunk

    output_loss.row_statistics, output_loss._Chunks._gathered = noted, watched
    output_loss.add_product = lambda *arguments: (add(*arguments), products.append(1))
    _fused(sequence_parallel, ROWS, chunk_rows, 1.0, torch.float64, by_row=False)
    return sizes, any(beside), len(products)


@pytest.mark.parametrize("sequence_parallel,chunks", [(False, 6), (True, 7)])
def test_one_chunk_of_logits_at_a_time_and_no_gradients_unasked(sequence_parallel, chunks):
    chunk_rows = 7  # 6 of two shares
    for sizes, beside, products in run_ranks(2, _walk, sequence_parallel, chunk_rows):
        assert len(sizes) == 2 * chunks and max(sizes) <= chunk_rows * VOCABULARY // 2 * 8
        assert not beside and products == chunks


def test_bfloat16_rounds_logits_and_results_only():
    """The same in float64, but for the roundings that there are: of the logits, of their gradient, and of the sums."""
    from distca.ops.output_loss import VocabularyShards, output_loss

    hidden, weight, labels, mask = _data()
    hidden, weight = hidden.bfloat16().requires_grad_(), (weight / 3).bfloat16().requires_grad_()
    shards = VocabularyShards(SimpleNamespace(rank=lambda: 0, size=lambda: 1), False)
    loss = output_loss(hidden, weight, labels, mask, shards, logits_bytes=2 * VOCABULARY * 2)
    loss.backward()
    assert loss.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16
    rows, columns = hidden.detach().double(), weight.detach().double()
    logits = (rows @ columns.t()).bfloat16().double()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert relative_error(loss, (losses * mask).sum()) < 1e-6
    ones = torch.nn.functional.one_hot(labels, VOCABULARY)
    d_logits = ((logits.softmax(1) - ones) * mask[:, None]).bfloat16().double()
    # One rounding to bfloat16: at most 2⁻⁹ of each number.
    assert relative_error(weight.grad, d_logits.t() @ rows) < 2**-9
    assert relative_error(hidden.grad, d_logits @ columns) < 2**-9
