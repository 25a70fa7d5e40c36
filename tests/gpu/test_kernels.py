"""GPU kernels against direct attention in float64, on whole and cut documents."""

import numpy as np
import pytest
import torch

from distca.attention import AttentionSpec, TaskBatch, choose_kernel
from distca.attention.reference import ReferenceKernel
from distca.errors import KernelError
from distca.plan.kinds import AttentionKind
from distca.testing.reference_attention import relative_error

# bfloat16 rounds at 2^-9 = 0.2 %; a kernel that rounds inputs, probabilities and outputs stays within a few of these.
TOLERANCE = 6e-3

BATCHES = {
    "whole odd lengths": [(n, n) for n in (1, 777, 130, 1, 2049, 64)],
    "cut documents": [(100, 4000), (1, 3001), (513, 513), (2048, 8192), (7, 7)],
    "many short documents": [(1 + (7 * n) % 50,) * 2 for n in range(300)],
}


def task_batch(case):
    """The borders of one of BATCHES."""
    q_rows, kv_rows = (np.array(rows) for rows in zip(*BATCHES[case], strict=True))
    borders = [np.concatenate(([0], np.cumsum(rows))).astype(np.int32) for rows in (q_rows, kv_rows)]
    return TaskBatch.of(*borders, "cuda")


@pytest.mark.parametrize("kernel", ["flash4", "torch"])
@pytest.mark.parametrize("heads,groups,dim", [(8, 2, 128), (4, 4, 64)])
@pytest.mark.parametrize("case", BATCHES)
def test_forward_and_backward(kernel, heads, groups, dim, case):
    try:
        chosen = choose_kernel(kernel, AttentionSpec(heads, groups, dim, torch.bfloat16, torch.device("cuda")))
    except KernelError as error:
        pytest.skip(str(error))
    batch, kind = task_batch(case), AttentionKind(dim**-0.5)
    rows, keys = (int(borders[-1]) for borders in (batch.borders_q, batch.borders_kv))
    generator = torch.Generator("cuda").manual_seed(1)
    q, do = (torch.randn(rows, heads, dim, device="cuda", generator=generator).bfloat16() for _ in range(2))
    # k and v as the server holds them: interleaved, so each is strided.
    kv = torch.randn(keys, 2, groups, dim, device="cuda", generator=generator).bfloat16()
    k, v = kv[:, 0], kv[:, 1]
    o, lse = chosen.forward(q, k, v, batch, kind)
    gradients = chosen.backward(do, q, k, v, o, lse, batch, kind)

    exact = ReferenceKernel()
    wide = [x.double() for x in (q, k, v)]
    o_exact, lse_exact = exact.forward(*wide, batch, kind)
    gradients_exact = exact.backward(do.double(), *wide, o_exact, lse_exact, batch, kind)
    assert relative_error(o, o_exact) < TOLERANCE
    assert relative_error(lse, lse_exact) < TOLERANCE
    for actual, expected in zip(gradients, gradients_exact, strict=True):
        assert relative_error(actual, expected) < TOLERANCE


def test_compiled_kernels_are_kept_on_disk():
    """Also with Megatron-Core, which imports flash-attn-4 first."""
    pytest.importorskip("flash_attn.cute")
    import megatron_patches.api  # noqa: F401
    from distca.attention.flash4 import Flash4Kernel

    Flash4Kernel()
    from flash_attn.cute import cache_utils, interface

    for function in (interface._flash_attn_fwd, interface._flash_attn_bwd):
        assert isinstance(function.compile_cache, cache_utils.JITPersistentCache)
