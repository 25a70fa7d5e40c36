"""Refuses settings, modules and versions of Megatron-Core that core attention disaggregation does not support.

This project replaces Megatron's layers, block, norms and loss. A setting that Megatron's part obeys, but its
replacement does not, is refused with a sentence before work starts. No setting is ignored silently. "Served" means
supported: the setting has the same effect as in Megatron-Core.
"""
