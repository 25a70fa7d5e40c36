"""Bytes of the tensors that are alive on a CPU rank, where operations allocate what the GPU's kernels do."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Self
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows the memory of every tensor that an operation returns; what was there before does not count.

    Args:
        peak: count after every operation.

    Attributes:
        peak: most bytes that were alive at once, if they were counted.
    """

    def __init__(self, peak: bool = True) -> None:
        super().__init__()
        self.peak, self._count, self._alive = 0, peak, 0
        self._seen: dict[int, tuple[weakref.ref[Any], int]] = {}  # with its bytes, by the id of the memory's object
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        self._before = {each.untyped_storage().data_ptr() for each in tensors}
        self._held = tensors  # so that their memory is not used again

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> None:
            resize(storage, size)
            if id(storage) in self._seen:
                self._count_anew(storage)

        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in self._seen and storage.data_ptr() not in self._before:
                    self._count_anew(storage)
        if self._count:
            self.peak = max(self.peak, self._alive)
        return out

    def _count_anew(self, storage: Any) -> None:
        """Memory that was not there, or had other bytes."""
        key = id(storage)
        self._forget(key)
        self._seen[key] = weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes()
        self._alive += storage.nbytes()

    def _forget(self, key: int) -> None:
        _, size = self._seen.pop(key, (None, 0))
        self._alive -= size

    def now(self) -> int:
        """Bytes that are alive."""
        there = [storage for each, _ in self._seen.values() if (storage := each()) is not None]
        assert self._alive == sum(storage.nbytes() for storage in there)
        return self._alive


class LeanKernel:
    """Core attention that computes nothing and allocates what flash-attn-4 does."""

    name = "reference"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any, kind: Any) -> Any:
        return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(q.shape[:2], dtype=torch.float32)

    def backward(self, do: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
        wide = [torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v)]
        return tuple(x.to(q.dtype) for x in wide)


class LeanNorm(torch.autograd.Function):
    """Keeps what the GPU's kernel keeps; the CPU's operations keep more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_zeros(x.shape[:-1], dtype=torch.float32))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_zeros(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(ctx.saved_tensors[0])


class _WeightedSwiglu(torch.autograd.Function):
    """Of experts, whose outputs are multiplied by a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: None, weights: torch.Tensor, *_: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weights)
        return x.new_zeros(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weights = ctx.saved_tensors
        return torch.zeros_like(x), None, torch.zeros_like(weights), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed_NF: torch.Tensor, cos_NE: torch.Tensor, sin_NE: torch.Tensor, groups: int, *factors: Any
    ) -> Any:
        ctx.save_for_backward(cos_NE, sin_NE, *([mixed_NF] if factors else []), *factors)
        rows, dim = len(mixed_NF), 2 * cos_NE.shape[1]
        heads = mixed_NF.shape[1] // dim - 2 * groups
        return mixed_NF.new_zeros(rows, heads, dim), mixed_NF.new_zeros(rows, 2, groups, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        columns = sum(each.shape[1:].numel() for each in gradients)
        factors = ctx.saved_tensors[3:]
        return gradients[0].new_zeros(len(gradients[0]), columns), None, None, None, *map(torch.zeros_like, factors)


class _Gated(torch.autograd.Function):
    """One compiled function: it keeps what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gate)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, gate = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(gate)


class _GatedNorm(torch.autograd.Function):
    """One compiled function with a kernel of a norm in it: it keeps what it is given, the number that multiplies each
    head, and the kernel's output, as torch.compile never runs such a kernel again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = x.new_zeros(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, gate, weight, scale, torch.zeros_like(x))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, gate, weight, *_ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(gate), torch.zeros_like(weight)


def allocate_as_on_gpus(patch: Any) -> None:
    """Replace what has a kernel on GPUs. ``patch(target, name, value)`` sets an attribute."""
    from megatron.core.transformer import mlp

    from distca.ops import grouped_linear, output_loss
    from distca.transport.collective import CollectiveTransport, _AllToAll
    from megatron_patches import pool
    from megatron_patches.experts import dispatch, grouped
    from megatron_patches.layers import layer
    from megatron_patches.patches import fused_ops as fused_rope
    from megatron_patches.patches import fused_ops as fused_swiglu
    from megatron_patches.patches import fused_ops as wgrad_accumulation
    from megatron_patches.patches import norms
    from megatron_patches.versions import has_gated_delta_net

    patch(pool, "choose_kernel", lambda *_, **__: LeanKernel())
    patch(norms.RMSNorm, "forward", lambda self, x: LeanNorm.apply(x, self.weight))
    patch(norms.RMSNorm, "fill", lambda self, x, out: out.zero_())
    patch(fused_swiglu, "swiglu", _Swiglu.apply)
    patch(mlp, "weighted_bias_swiglu_impl", _WeightedSwiglu.apply)
    patch(grouped, "swiglu", lambda x, factors, gate: _WeightedSwiglu.apply(x, None, factors))
    patch(grouped_linear, "row_dots", lambda a, b: a.new_zeros(a.shape[:-1], dtype=torch.float32))
    patch(fused_swiglu, "fill_swiglu", lambda x, out: out.zero_())
    patch(dispatch, "expert_sums", lambda x, pairs: x.new_zeros(len(pairs), *x.shape[1:]))
    for module in (layer, fused_rope):
        patch(module, "split_and_rotate", rotate)
    if has_gated_delta_net():
        from megatron.core.ssm.gated_delta_net import GatedDeltaNet
        from megatron.core.transformer.attention import Attention

        patch(GatedDeltaNet, "_apply_gated_norm", lambda self, x, z: _GatedNorm.apply(x, z, self.out_norm.weight))
        patch(Attention, "_apply_output_gate", lambda self, x, gate: _Gated.apply(x, gate))
    for module in (output_loss, wgrad_accumulation, grouped_linear):
        patch(module, "add_product", lambda *_: None)
    # Rows land in memory of their own (NVSHMEM's), not in tensors.
    room, start = CollectiveTransport._all_to_all, _AllToAll.start
    patch(CollectiveTransport, "_all_to_all", lambda self, part: _unseen(room, self, part))
    patch(_AllToAll, "start", lambda self: _unseen(start, self))


def rotate(mixed: torch.Tensor, rotation: Any, groups: int, norms: Any = None) -> Any:
    """Takes the place of ``split_and_rotate``."""
    factors = () if norms is None else (norms.query_D, norms.key_D)
    return _Rotate.apply(mixed, rotation.cos_NE, rotation.sin_NE, groups, *factors)


def _unseen(function: Any, *arguments: Any) -> Any:
    with torch.utils._python_dispatch._disable_current_modes():
        return function(*arguments)
