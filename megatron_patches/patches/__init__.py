"""Replacements for parts of Megatron-Core: fused operations, and running it on CPUs."""
