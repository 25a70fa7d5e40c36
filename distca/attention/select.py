"""Choose a kernel once, say which and why, and let the user decide otherwise."""

from __future__ import annotations

import importlib.util
import logging
from typing import Literal, get_args

import numpy as np
import torch

from distca.attention.flash4 import Flash4Kernel
from distca.attention.kernel import Kernel, TaskBatch
from distca.attention.reference import ReferenceKernel
from distca.attention.torch_flash import TorchFlashKernel
from distca.errors import KernelError
from distca.plan.kinds import AttentionKind

logger = logging.getLogger(__name__)

KernelName = Literal["auto", "flash4", "torch", "reference"]
"""Core-attention kernels, and "auto" for the fastest that can run."""
NAMES: tuple[str, ...] = get_args(KernelName)


def choose_kernel(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool = False,
    setting: str = "`kernel`",
) -> Kernel:
    """Return the named kernel, or with "auto" the fastest that can run here.

    Args:
        name: "auto", "flash4", "torch" or "reference".
        device: where q, k and v live.
        dtype: their dtype.
        head_dim: elements per head.
        deterministic: ask for bitwise equal gradients from run to run; the torch kernel then is not chosen.
        setting: where the name is from, for the message.

    Raises:
        KernelError: the name is unknown or that kernel cannot run here; the message says why.
    """
    if name not in NAMES:
        raise KernelError(f"{setting} is '{name}'; it can be {', '.join(NAMES)}.")
    device = torch.device(device)
    reasons = {
        "flash4": why_not_flash4(device, dtype, head_dim),
        "torch": why_not_torch(device, dtype, head_dim, deterministic),
        "reference": None,
    }
    if name != "auto" and reasons[name]:
        raise KernelError(
            f"{setting} {name} cannot run here: {reasons[name]}. Set {setting} to auto to choose another."
        )
    chosen = name if name != "auto" else next(n for n in ("flash4", "torch", "reference") if reasons[n] is None)
    skipped = "; ".join(f"not {n}: {why}" for n, why in reasons.items() if why and name == "auto")
    slow = chosen == "reference" and name == "auto" and device.type == "cuda"
    logger.log(
        logging.WARNING if slow else logging.INFO,
        "Core attention kernel: %s%s%s",
        *(chosen, ", which is slow" if slow else "", f" ({skipped})" if skipped else ""),
    )
    if chosen == "flash4":
        return Flash4Kernel(deterministic)
    return TorchFlashKernel() if chosen == "torch" else ReferenceKernel()


def why_not_flash4(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why flash-attn-4 cannot run here, or None if it can."""
    reason = _why_not_gpu(device, dtype)
    if reason:
        return reason
    if not _installed("flash_attn.cute"):
        return "flash-attn-4 is not installed"
    if torch.cuda.get_device_capability(device)[0] < 9:
        return f"{torch.cuda.get_device_name(device)} is older than Hopper"
    if head_dim % 8 or head_dim > 128:
        return f"its backward takes head dimensions up to 128 in steps of 8, not {head_dim}"
    return None


def why_not_torch(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False) -> str | None:
    """Why torch's built-in flash attention cannot run here, or None if it can."""
    reason = _why_not_gpu(device, dtype)
    if reason:
        return reason
    if head_dim % 8 or head_dim > 256:
        return f"it takes head dimensions up to 256 in steps of 8, not {head_dim}"
    if deterministic:
        return "its backward is not deterministic"
    return None


def _why_not_gpu(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "the tensors are not on a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def warm_up(kernel: Kernel, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Run forward and backward once on a few rows, so that a kernel that is compiled when it is first used is compiled
    now and not while other ranks wait for its rows.

    Args:
        kernel: the kernel.
        heads: query heads of this rank.
        kv_heads: key/value heads of this rank.
        head_dim: elements per head.
        dtype: of the rows.
        device: where they live.
    """
    rows = 256
    batch = TaskBatch.of(np.array([0, rows // 2, rows]), np.array([0, rows // 2, 2 * rows]), device)
    q = torch.zeros(rows, heads, head_dim, dtype=dtype, device=device)
    # Keys and values lie beside each other, as they travel.
    kv = torch.zeros(2 * rows, 2, kv_heads, head_dim, dtype=dtype, device=device)
    kind = AttentionKind(head_dim**-0.5)
    o, lse = kernel.forward(q, kv[:, 0], kv[:, 1], batch, kind)
    kernel.backward(torch.zeros_like(o), q, kv[:, 0], kv[:, 1], o, lse, batch, kind)
