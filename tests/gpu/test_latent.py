"""The kernel of latent attention on GPUs, with keys of 192 and values of 128, against direct attention in float64.

Once it has passed on a GPU, ``megatron_patches/support/latent.py`` can take latent attention there, with fused norms
and rotary angles checked by a run against attention at home, and a cost table of such heads measured.
"""

import pytest
import torch

from distca.attention import AttentionSpec, choose_kernel
from distca.attention.reference import ReferenceKernel
from distca.attention.self_check import furthest
from distca.errors import KernelError
from distca.plan.kinds import AttentionKind
from distca.runtime.server import keys_and_values, together
from distca.testing.reference_attention import relative_error
from tests.gpu.test_kernels import BATCHES, TOLERANCE, task_batch

pytestmark = pytest.mark.gpu

KEYS, VALUES, HEADS = 192, 128, 4
CUDA = torch.device("cuda")
SCALE = AttentionKind(1.27 * KEYS**-0.5)
"""With the factor that YaRN puts on scores."""


@pytest.fixture(scope="module")
def kernel():
    spec = AttentionSpec(HEADS, HEADS, KEYS, torch.bfloat16, CUDA, kinds=(SCALE,), value_dim=VALUES)
    try:
        return choose_kernel("flash4", spec)
    except KernelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", BATCHES)
def test_forward_and_backward(kernel, case):
    """Keys and values lie beside each other, as they travel to servers, and so do their gradients."""
    batch = task_batch(case)
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(rows, width):
        return torch.randn(int(rows), HEADS, width, device="cuda", generator=generator).bfloat16()

    q, do = draw(batch.borders_q[-1], KEYS), draw(batch.borders_q[-1], VALUES)
    kv = draw(batch.borders_kv[-1], KEYS + VALUES)
    o, lse = kernel.forward(q, *keys_and_values(kv, KEYS), batch, SCALE)
    dq, dk, dv = kernel.backward(do, q, *keys_and_values(kv, KEYS), o, lse, batch, SCALE)

    exact, wide = ReferenceKernel(), [q.double(), *keys_and_values(kv.double(), KEYS)]
    o_exact, lse_exact = exact.forward(*wide, batch, SCALE)
    dq_exact, dk_exact, dv_exact = exact.backward(do.double(), *wide, o_exact, lse_exact, batch, SCALE)
    assert together(dk, dv).shape == kv.shape
    found = zip((o, lse, dq, dk, dv), (o_exact, lse_exact, dq_exact, dk_exact, dv_exact), strict=True)
    assert all(relative_error(actual, expected) < TOLERANCE for actual, expected in found)


@pytest.mark.parametrize("heads", [1, 8, 16])
def test_numbers_of_heads_on_tensor_parallel_ranks(kernel, heads):
    spec = AttentionSpec(heads, heads, KEYS, torch.bfloat16, CUDA, value_dim=VALUES)
    assert furthest(kernel, spec, SCALE).excess < 1
