"""Replacements for parts of Megatron-Core, such as its forward and its norms, and for torch functions on CPUs."""
