"""Memory of a GPU, and page-locked memory of its host."""

from __future__ import annotations

import torch


def outside_torch(device: torch.device) -> int:
    """Bytes of a GPU that are neither free nor reserved by torch: CUDA context, kernels, NCCL's buffers, NVSHMEM's
    memory, libraries' workspaces, and whatever other processes have there."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def page_lock(memory: torch.Tensor) -> bool:
    """Locks the memory of a tensor on the CPU until :func:`page_unlock`; returns False if CUDA refuses.

    A GPU copies other host memory at a fraction of the speed, and the host waits for it."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


def page_unlock(memory: torch.Tensor) -> None:
    """Unlocks memory, before it is freed and when no copy uses it any more."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
