"""Everything that knows megatron-core's insides, and nothing else does. Made for megatron-core 0.16.1 to 0.19."""

from megatron_patches.patches.without_triton import do_without_triton

do_without_triton()  # here, so that it comes before whichever module of ours imports megatron-core first
