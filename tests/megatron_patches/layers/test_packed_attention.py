"""Packed attention beside padding rows: the kernel's output is freed until backward, and gradients do not change."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distca.attention import TaskBatch
from distca.attention.kernel import core_attention
from distca.attention.reference import ReferenceKernel
from distca.plan import AttentionKind
from distca.runtime.timeline import Timeline
from megatron_patches.layers.packed_attention import PackedAttention
from megatron_patches.steps.batch_context import PackedMicroBatch


class _Remembering(ReferenceKernel):
    """Knows the memory of what it put out."""

    def forward(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = super().forward(*arguments)
        self.memory = o.untyped_storage()
        return o, lse


@pytest.mark.parametrize("lengths,padding", [((5, 1, 9), 3), ((7,), 1), ((1,), 6), ((4, 4), 0), ((), 2)])
def test_gradients_with_padding(lengths: tuple[int, ...], padding: int) -> None:
    torch.manual_seed(len(lengths))
    borders = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    rows = int(borders[-1])
    batch = TaskBatch.of(borders, borders, "cpu")
    module = PackedAttention(
        SimpleNamespace(
            softmax_scale=None, kv_channels=8, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"
        ),
        1,
    )
    module.kernel, module.timeline = _Remembering(), Timeline("cpu")
    module.timeline.start_recording()
    heads = (4, 2, 2)
    inputs = [torch.randn(rows + padding, 1, n, 8, dtype=torch.float64, requires_grad=True) for n in heads]
    found = module(*inputs, PackedMicroBatch(batch, rows))
    assert module.timeline.order == ["serve 0 ping forward"] * bool(rows)
    if rows:
        assert bool(module.kernel.memory.nbytes()) == (not padding), "of two copies one is enough"
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), inputs, materialize_grads=True)
    assert found.shape == (rows + padding, 1, 32) and not found[rows:].any()
    assert not any(gradient[rows:].any() for gradient in gradients)
    if rows:
        same = [x.detach()[:rows, 0].requires_grad_() for x in inputs]
        o = core_attention(*same, batch, ReferenceKernel(), module.kind)
        expected = torch.autograd.grad((o.flatten(1) * weights[:rows, 0]).sum(), same)
        assert torch.equal(found[:rows, 0], o.flatten(1))
        assert all(torch.equal(a[:rows, 0], b) for a, b in zip(gradients, expected, strict=True))


def test_a_rank_without_documents_gives_gradients_to_all_inputs() -> None:
    micro_batch = PackedMicroBatch(TaskBatch.of(np.zeros(1, np.int64), np.zeros(1, np.int64), "cpu"), 0)
    sizes = ((0, 4, 8), (0, 2, 8), (0, 2, 6), (4,))
    inputs = [torch.ones(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    q, k, v, sinks = inputs
    for given in (None, sinks):
        o = micro_batch.attend(ReferenceKernel(), q, k, v, AttentionKind(1.0), lambda _: nullcontext(), given)
        assert o.shape == (0, 4, 6) and o.dtype == torch.bfloat16, "heads are as wide as values"
        used = inputs if given is not None else inputs[:3]
        gradients = torch.autograd.grad(torch.nn.functional.pad(o, (0, 0, 0, 0, 0, 2)).sum(), used)
        assert not any(gradient.any() for gradient in gradients)
