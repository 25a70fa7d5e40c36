"""Latent attention on GPUs, with keys of 192 and values of 128: its kernel against direct attention in float64, and
whole runs against those with attention at home. ``tests/gpu/test_parity.py -k latent`` holds layers against
Megatron-Core.

``DISTCA_RESULTS=folder`` keeps losses and peak memory of runs in folder/gpu_latent_*.json.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distca.attention import AttentionSpec, choose_kernel
from distca.attention.reference import ReferenceKernel
from distca.attention.self_check import furthest
from distca.errors import KernelError
from distca.plan.kinds import AttentionKind
from distca.runtime.server import keys_and_values, together
from distca.testing.reference_attention import relative_error
from megatron_patches.versions import has_gated_delta_net
from tests.gpu.runs import keep_results, train_on_gpus
from tests.gpu.starts import Case, Starts
from tests.gpu.test_kernels import BATCHES, TOLERANCE, task_batch
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu

KEYS, VALUES, HEADS = 192, 128, 4
CUDA = torch.device("cuda")
SCALE = AttentionKind(1.27 * KEYS**-0.5)
"""With the factor that YaRN puts on scores."""
LATENT: dict[str, object] = {
    "model.kv_heads": 8,
    "model.latent.kv_rank": 256,
    "model.latent.q_rank": 384,
    "model.latent.score_magnitude": 1.0,
    "model.rope_scaling.kind": "yarn",
    "model.rope_scaling.factor": 4,
    "model.rope_scaling.original_length": 2048,
}
EXPERTS: dict[str, object] = {
    "model.latent.q_rank": 0,
    "model.experts.count": 8,
    "model.experts.topk": 2,
    "model.experts.ffn": 512,
    "model.experts.dense_layers": 1,
    "model.experts.shared_ffn": 512,
    "model.experts.score": "sigmoid",
    "model.experts.bias": "true",
    "model.experts.document_balance": 0.001,
    "parallel.ep": 2,
}
KEPT = ("loss", "grad_norm", "peak_memory_gb", "predicted_memory_gb")
MODES: dict[str, dict[str, object]] = {
    "home": {"cad.enabled": "false"},
    "keep": {},
    "nccl": {"cad.transport": "nccl"},
    "resend": {"cad.backward": "resend", "train.recompute": "mlp"},
    "recompute": {"train.recompute": "all"},
    "offload": {"train.recompute": "all", "train.offload": "all"},
}

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "alone": (1, {}),
    "two": (2, {}),
    "tp": (2, {"parallel.tp": 2}),
    "experts": (2, EXPERTS),
}
"""Ranks, and settings beside LATENT."""


def _runs(folder: Path, own: dict[str, object]) -> list[dict[str, object]]:
    return [{"name": name, "output": folder} | LATENT | own | mode for name, mode in MODES.items()]


def cases(folder: Path) -> dict[str, Case]:
    return {name: Case(ranks, train_on_gpus, (_runs(folder / name, own),)) for name, (ranks, own) in LAYOUTS.items()}


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


@pytest.mark.skipif(not has_gated_delta_net(), reason="Latent attention is served with Megatron-Core 0.19")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_train_as_with_attention_at_home(layout: str, starts: Starts) -> None:
    ranks, _ = LAYOUTS[layout]
    starts.result(layout)
    found = {name: {key: steps_of(starts.folder / layout / name, key) for key in KEPT} for name in MODES}
    keep_results(f"latent_{layout}", ranks, found)
    losses, norms = (found["home"][key] for key in ("loss", "grad_norm"))
    assert list(losses) == [1, 2, 3, 4]
    for name in MODES:
        assert found[name]["loss"] == pytest.approx(losses, rel=5e-4), name
        assert found[name]["grad_norm"] == pytest.approx(norms, rel=1e-2), name
