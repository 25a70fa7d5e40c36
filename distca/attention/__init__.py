"""Core-attention kernels behind one pair of functions, forward and backward."""

from distca.attention.choose import choose_kernel
from distca.attention.kernel import Kernel, KernelError, TaskBatch

__all__ = ["Kernel", "KernelError", "TaskBatch", "choose_kernel"]
