"""All code that replaces or changes parts of Megatron-Core, for its versions 0.16.1 to 0.19."""

from megatron_patches.patches.before_import import compile_on_gpus_only, do_without_triton
from megatron_patches.te.installed import hide_without_gpu

# These have to run before Megatron-Core is imported, and an import of any module of this package runs them first.
compile_on_gpus_only()
do_without_triton()
hide_without_gpu()
