"""DistCA in Megatron-Core 0.16.1 to 0.19: the class CAD (``api.py``), its parts, and patches of Megatron-Core."""

from megatron_patches.patches.before_import import compile_on_gpus_only, do_without_triton
from megatron_patches.te.installed import hide_without_gpu

# These change how Megatron-Core is imported, so an import of any module of this package runs them first. They come too
# late for a script that has imported Megatron-Core before.
compile_on_gpus_only()
do_without_triton()
hide_without_gpu()
