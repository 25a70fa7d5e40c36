"""The fused loss and rotation on a GPU against float64, and the memory that the loss takes."""

import pytest
import torch
import torch.distributed as dist

from distca.testing.reference_attention import relative_error

# bfloat16 rounds at 2^-9 = 0.2 %. The logits are rounded before the loss and their gradient after it, as in
# megatron-core, whose distance from float64 is the limit; here one that a wrong row or column would exceed.
TOLERANCE = 6e-3


@pytest.fixture
def shards():
    """One rank that holds the whole vocabulary."""
    from distca.ops.output_loss import VocabularyShards

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield VocabularyShards(dist.group.WORLD, False)
    dist.destroy_process_group()


def _data(rows, hidden, vocabulary, dtype):
    generator = torch.Generator("cuda").manual_seed(rows)
    h = torch.randn(rows, hidden, device="cuda", generator=generator).to(dtype)
    w = (torch.randn(vocabulary, hidden, device="cuda", generator=generator) * 2 * hidden**-0.5).to(dtype)
    labels = torch.randint(vocabulary, (rows,), device="cuda", generator=generator)
    return h, w, labels, torch.rand(rows, device="cuda", generator=generator) < 0.7


def _unfused(h, w, labels, mask, dtype):
    """(loss, gradients of h and w) by torch in ``dtype``, the loss in at least float32 as in megatron-core."""
    h, w = h.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
    logits = (h @ w.t()).to(torch.promote_types(dtype, torch.float32))
    loss = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * mask).sum()
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize(
    "rows,hidden,vocabulary,chunk", [(1, 64, 128, 1), (777, 256, 5003, 100), (1031, 512, 32000, 999)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loss_is_no_farther_from_float64_than_unfused(shards, rows, hidden, vocabulary, chunk, dtype):
    from distca.ops.output_loss import output_loss

    h, w, labels, mask = _data(rows, hidden, vocabulary, dtype)
    mask[0] = True
    exact = _unfused(h, w, labels, mask, torch.float64)
    unfused = _unfused(h, w, labels, mask, dtype)
    h.requires_grad_(), w.requires_grad_()
    loss = output_loss(h, w, labels, mask, shards, chunk * vocabulary * dtype.itemsize)
    fused = (loss.detach(), *torch.autograd.grad(loss, (h, w)))
    assert not fused[1][~mask].any()
    for ours, theirs, expected in zip(fused, unfused, exact, strict=True):
        assert relative_error(ours, expected) < TOLERANCE
        if ours.dim():  # the error of a single number is a matter of luck
            assert relative_error(ours, expected) <= 1.1 * relative_error(theirs, expected) + 1e-6


@pytest.mark.parametrize("columns", [1, 5003, 32064])
def test_statistics_and_gradient_of_a_share_of_the_vocabulary(columns):
    """Targets before and behind the share belong to other ranks."""
    from distca.ops.cross_entropy import logits_to_gradient_, row_statistics

    generator = torch.Generator("cuda").manual_seed(columns)
    logits = (4 * torch.randn(301, columns, device="cuda", generator=generator)).bfloat16()
    targets = torch.randint(-columns, 2 * columns, (301,), device="cuda", generator=generator)
    exact = row_statistics(logits.cpu().double(), targets.cpu())
    statistics = row_statistics(logits, targets)
    for ours, expected in zip(statistics, exact, strict=True):
        assert relative_error(ours, expected) < 1e-6
    lse = statistics[0] + statistics[1].log() + 0.5  # other ranks' columns add to it
    weights = torch.rand(301, device="cuda", generator=generator)
    gradient = logits.cpu().double()
    logits_to_gradient_(gradient, targets.cpu(), lse.cpu().double(), weights.cpu().double())
    logits_to_gradient_(logits, targets, lse, weights)
    assert relative_error(logits, gradient) < TOLERANCE


def test_products_are_added_in_float32():
    from distca.ops.output_loss import add_product

    generator = torch.Generator("cuda").manual_seed(2)
    a, b = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in ((777, 640), (777, 256)))
    total = torch.randn(640, 256, device="cuda", generator=generator)
    exact = total.double() + a.t().double() @ b.double()
    add_product(total, a.t(), b)
    assert relative_error(total, exact) < 2e-6


def test_loss_takes_a_chunk_of_logits_and_the_gradients(shards):
    """16K rows × 128K vocabulary would be 4 GiB of bfloat16 logits and 8 GiB in float32."""
    from distca.ops.output_loss import output_loss

    rows, hidden, vocabulary, chunk = 16384, 1024, 128256, 1 << 29
    h, w, labels, mask = _data(rows, hidden, vocabulary, torch.bfloat16)
    h.requires_grad_(), w.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(output_loss(h, w, labels, mask, shards, chunk), (h, w))
    taken = torch.cuda.max_memory_allocated() - before
    gradients = 2 * h.numel() * 2 + (4 + 2) * w.numel()
    # 64 MiB for cuBLAS's workspace and rows' figures.
    assert taken <= chunk + gradients + (64 << 20)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows,heads,groups,dim", [(1, 8, 2, 64), (777, 32, 8, 128), (301, 6, 1, 96), (0, 8, 2, 64)])
def test_rotation_is_no_farther_from_float64_than_megatrons(rows, heads, groups, dim, normed):
    from distca.ops.rotary import HeadNorms, Rotation, split_and_rotate

    generator = torch.Generator("cuda").manual_seed(rows)
    angles = torch.randn(rows, 1, 1, dim // 2, device="cuda", generator=generator) * 1e4
    rotation = Rotation.of(torch.cat((angles, angles), -1))
    mixed = torch.randn(rows, (heads + 2 * groups) * dim, device="cuda", generator=generator).bfloat16()
    q, kv = (
        torch.randn(rows, *shape, device="cuda", generator=generator).bfloat16()
        for shape in ((heads, dim), (2, groups, dim))
    )

    factors = [1 + 0.1 * torch.randn(dim, device="cuda", generator=generator).bfloat16() for _ in range(2 * normed)]

    def everything(dtype, device):
        x, *of_norms = leaves = [each.to(device, dtype).requires_grad_() for each in (mixed, *factors)]
        norms = HeadNorms(*of_norms, 1e-6) if normed else None
        outputs = split_and_rotate(x, Rotation(rotation.cos_NE.to(device), rotation.sin_NE.to(device)), groups, norms)
        return *outputs, *torch.autograd.grad(outputs, leaves, [g.to(device, dtype) for g in (q, kv)])

    # On CPUs the plain version runs, in bfloat16 with the rounding of megatron-core's unfused one.
    exact = everything(torch.float64, "cpu")
    unfused = everything(torch.bfloat16, "cpu")
    for ours, theirs, expected in zip(everything(torch.bfloat16, "cuda"), unfused, exact, strict=True):
        assert ours.shape == expected.shape
        assert relative_error(ours, expected) <= relative_error(theirs, expected) + 1e-6


def _grads(function, inputs, upstream, dtype, device):
    inputs = [x.to(device, dtype).requires_grad_() for x in inputs]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, upstream.to(device, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows,width", [(1, 3), (777, 2048), (300, 5000), (0, 64)])
def test_swiglu_is_no_farther_from_float64_than_megatrons(rows, width, dtype):
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from distca.ops.swiglu import swiglu

    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 1, 2 * width, device="cuda", generator=generator).to(dtype)
    upstream = torch.randn(rows, 1, width, device="cuda", generator=generator).to(dtype)
    ours = _grads(swiglu, [x], upstream, dtype, "cuda")
    assert ours[0].shape == (rows, 1, width) and ours[1].shape == x.shape
    if rows:
        exact = _grads(swiglu, [x], upstream, torch.float64, "cpu")
        stock = _grads(lambda x: bias_swiglu_impl(x, None), [x], upstream, dtype, "cuda")
        for mine, theirs, expected in zip(ours, stock, exact, strict=True):
            assert relative_error(mine, expected) <= 1.02 * relative_error(theirs, expected) + 1e-7


@pytest.mark.parametrize("rows,width", [(1, 3), (777, 768), (300, 5000), (0, 64)])
def test_swiglu_with_factors_is_no_farther_from_float64_than_megatrons(rows, width):
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    from distca.ops.swiglu import swiglu

    generator = torch.Generator("cuda").manual_seed(rows)
    x, upstream = (torch.randn(rows, n, device="cuda", generator=generator).bfloat16() for n in (2 * width, width))
    factors = torch.rand(rows, device="cuda", generator=generator)

    def run(function, dtype):
        inputs = [x.to(dtype).requires_grad_(), factors.to(torch.promote_types(dtype, torch.float32)).requires_grad_()]
        out = function(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, upstream.to(dtype))

    ours = run(swiglu, torch.bfloat16)
    assert ours[0].shape == (rows, width)
    if rows:
        stock = run(lambda x, factors: weighted_bias_swiglu_impl(x, None, factors[:, None]), torch.bfloat16)
        for mine, theirs, expected in zip(ours, stock, run(swiglu, torch.float64), strict=True):
            assert relative_error(mine, expected) <= 1.02 * relative_error(theirs, expected) + 1e-6


def test_swiglu_of_more_than_2_to_the_31_numbers():
    """Offsets within the input need 64 bits."""
    from distca.ops.swiglu import swiglu

    x = torch.empty(80_000, 28_672, device="cuda", dtype=torch.bfloat16)
    x.normal_(generator=torch.Generator("cuda").manual_seed(1))
    last = x[-3:].clone()
    assert torch.equal(swiglu(x)[-3:], swiglu(last))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows,columns", [(1, 64), (777, 4096), (200_001, 96), (5, 8192), (0, 64)])
def test_norm_is_no_farther_from_float64_than_torchs(rows, columns, dtype):
    from distca.ops.triton.rms_norm import rms_norm

    generator = torch.Generator("cuda").manual_seed(rows)
    x, upstream = (3 * torch.randn(rows, 1, columns, device="cuda", generator=generator).to(dtype) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(columns, device="cuda", generator=generator).to(dtype)
    ours = _grads(lambda x, w: rms_norm(x, w, 1e-5), [x, weight], upstream, dtype, "cuda")
    assert torch.equal(ours[2], _grads(lambda x, w: rms_norm(x, w, 1e-5), [x, weight], upstream, dtype, "cuda")[2])

    def torchs(x, w):
        return torch.nn.functional.rms_norm(x, (columns,), w, 1e-5)

    if rows:
        exact = _grads(torchs, [x, weight], upstream, torch.float64, "cuda")
        stock = _grads(torchs, [x, weight], upstream, dtype, "cuda")
        for mine, theirs, expected in zip(ours, stock, exact, strict=True):
            assert relative_error(mine, expected) <= 1.02 * relative_error(theirs, expected) + 1e-6


@pytest.mark.parametrize("rows,columns", [(1, 64), (777, 4096), (200_001, 96), (0, 64)])
def test_added_norm_is_no_farther_from_float64_than_torchs(rows, columns):
    """A branch is added to the residual stream and the sum normalised, and normalised again for the next layer."""
    from distca.ops.triton.rms_norm import add_rms_norm

    dtype = torch.bfloat16
    generator = torch.Generator("cuda").manual_seed(rows)
    x, branch, *upstream = (torch.randn(rows, 1, columns, device="cuda", generator=generator) for _ in range(5))
    weight = 1 + 0.1 * torch.randn(columns, device="cuda", generator=generator).to(dtype)

    def torchs(x, branch, weight, epsilon):
        total = x if branch is None else x + branch
        return total, torch.nn.functional.rms_norm(total, (columns,), weight, epsilon)

    def run(function, held):
        inputs = [each.to(dtype).to(held).requires_grad_() for each in (x, branch, weight)]
        total, normed = function(*inputs, 1e-5)
        same, again = function(total, None, inputs[2], 1e-5)
        gradients = torch.autograd.grad((same, normed, again), inputs, [each.to(dtype).to(held) for each in upstream])
        return [each.detach() for each in (total, normed, again, *gradients)]

    ours = run(add_rms_norm, dtype)
    assert all(torch.equal(*pair) for pair in zip(ours, run(add_rms_norm, dtype), strict=True))
    if rows:
        for mine, theirs, expected in zip(ours, run(torchs, dtype), run(torchs, torch.float64), strict=True):
            assert relative_error(mine, expected) <= 1.02 * relative_error(theirs, expected) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_multiplied_by_a_factor_that_is_not_rounded(dtype):
    from distca.ops.scaling import scaled

    generator = torch.Generator("cuda").manual_seed(3)
    gradients = torch.randn(1 << 20, device="cuda", generator=generator).to(dtype)
    factor = torch.tensor(1 / 1237, device="cuda")
    assert torch.equal(scaled(gradients, factor), (gradients.float() * factor).to(dtype))
    if dtype == torch.bfloat16:  # a rounded factor would be seen
        assert not torch.equal(gradients * factor.to(dtype), scaled(gradients, factor))
