"""Memory of a GPU."""

from __future__ import annotations

import torch


def outside_torch(device: torch.device) -> int:
    """Bytes of a GPU that are neither free nor reserved by torch: CUDA context, kernels, NCCL's buffers, NVSHMEM's
    memory, libraries' workspaces, and whatever other processes have there."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
