"""Computes the norm of gradients, and scales them for clipping, without waiting for the GPU at each weight.

Megatron-Core takes these functions from Transformer Engine or Apex. If neither has them all, it takes functions of its
own, which copy one norm for each weight to the host. A model with experts has hundreds of weights in a layer. Here one
operation computes all norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads


def norm_gradients_together() -> None:
    """Replaces Megatron's own functions in this process. Those of Transformer Engine and Apex are not replaced."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale


def _norm(_: int, __: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], *___: Any) -> tuple[torch.Tensor, None]:
    """Returns [1] float32, the norm over all gradients together; ``tensors`` is a list of one list, as Megatron calls
    it."""
    (gradients,) = tensors
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients), dtype=torch.float32)))[None], None


def _scale(size: int, flag: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], factor: float) -> None:
    """Multiplies tensors by a factor, as Megatron calls it: ``tensors`` are a list to read and a list to write, which
    may be the same."""
    given, into = tensors
    if all(a.data_ptr() == b.data_ptr() for a, b in zip(given, into, strict=True)):
        torch._foreach_mul_(list(into), factor)
    else:
        utils.local_multi_tensor_scale(size, flag, tensors, factor)
