"""Page-locked host memory: of other memory a GPU copies at a fraction of the speed, and the host waits for it."""

from __future__ import annotations

import torch


def page_lock(memory: torch.Tensor) -> bool:
    """Lock the memory of a tensor on the CPU until :func:`page_unlock`; False if CUDA refuses."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


def page_unlock(memory: torch.Tensor) -> None:
    """Before memory that was locked is freed, and when no copy uses it any more."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
