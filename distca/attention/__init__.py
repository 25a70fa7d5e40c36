"""Core-attention kernels behind one interface of two functions, forward and backward; and the choice between them."""

from distca.attention.kernel import Kernel, TaskBatch
from distca.attention.select import KernelName, choose_kernel
from distca.attention.self_check import AttentionSpec
from distca.errors import KernelError

__all__ = ["AttentionSpec", "Kernel", "KernelError", "KernelName", "TaskBatch", "choose_kernel"]
