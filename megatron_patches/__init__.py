"""Everything that knows megatron-core's insides, and nothing else does. Made for megatron-core 0.16.1 to 0.19."""

from megatron_patches.patches.before_import import compile_on_gpus_only, do_without_triton
from megatron_patches.te.installed import hide_without_gpu

# Here, so that they come before whichever module of ours imports megatron-core first.
compile_on_gpus_only()
do_without_triton()
hide_without_gpu()
