"""Computes the norm of gradients, and scales them for clipping, without waiting for the GPU at each weight.

Megatron-Core's own function, which it uses without Transformer Engine and Apex, copies the norm of each weight's
gradient to the host. This file's functions work on the GPU. Newer versions of Megatron-Core also leave the norm of all
gradients on the GPU. Older versions copy it to the host, and so wait once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as optimizers

from distca.ops.scaling import scaled


def norm_gradients_together() -> None:
    """Replaces Megatron's own functions in this process, but not those of Transformer Engine or Apex."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm
        optimizers.get_grad_norm_fp32 = _without_dimensions(optimizers.get_grad_norm_fp32)
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale
        if hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):
            clip_grads.multi_tensor_scale_tensor_impl = _scale_by_tensor


def _norm(_: int, __: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], *___: Any) -> tuple[torch.Tensor, None]:
    """Returns the norm of all gradients together, and None. ``tensors`` holds one list, the gradients.

    The norm is a float32 tensor without dimensions. Newer versions of Megatron-Core return such a tensor from
    ``optimizer.step()``. Scripts can print the norm with a number's format, which a tensor with dimensions refuses."""
    (gradients,) = tensors
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients), dtype=torch.float32))), None


def _without_dimensions(norm_of: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Megatron's ``norm_of``, changed so that its result has no dimensions.

    On a rank without gradients Megatron's own result has one."""

    def norm(*arguments: Any, **named: Any) -> Any:
        found = norm_of(*arguments, **named)
        return found.reshape(()) if isinstance(found, torch.Tensor) else found

    return norm


def _scale(size: int, flag: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], factor: float) -> None:
    """Multiplies gradients by ``factor``. ``tensors`` holds two lists: the tensors to read, and those to write.

    A tensor to write may be the one that is read."""
    given, into = tensors
    if into and all(a.data_ptr() == b.data_ptr() for a, b in zip(given, into, strict=True)):
        torch._foreach_mul_(list(into), factor)
    else:
        utils.local_multi_tensor_scale(size, flag, tensors, factor)


def _scale_by_tensor(_: int, __: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], factor: torch.Tensor) -> None:
    """Multiplies the first of two lists by ``factor``, of one element, and writes to the second.

    Megatron gives the same list twice."""
    given, into = tensors
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(given, into, strict=True))
    if not into:  # an empty list is an error in torch
        return
    if all(each.dtype == factor.dtype for each in into):
        torch._foreach_mul_(list(into), factor.reshape(()))
        return
    for each in into:
        scaled(each, factor, out=each)
