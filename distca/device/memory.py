"""Memory of a GPU outside torch's allocator, and page-locked memory of its host."""

from __future__ import annotations

import torch


def outside_torch(device: torch.device) -> int:
    """Returns the bytes of a GPU that are neither free nor reserved by torch's allocator.

    They hold the CUDA context, kernels, buffers of NCCL and NVSHMEM, libraries' workspaces, and other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def page_lock(memory: torch.Tensor) -> bool:
    """Page-locks a CPU tensor's memory until :func:`page_unlock`; returns False if CUDA refuses.

    Copies between a GPU and memory that is not locked run at a fraction of the speed, and make the host wait."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


def page_unlock(memory: torch.Tensor) -> None:
    """Unlocks a tensor's memory; call it when no copy uses the memory any more, and before it is freed."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
