"""Refuses settings, modules and versions of Megatron-Core that core attention disaggregation does not support.

This project replaces Megatron's layers, block, norms and loss. Settings that a replacement does not obey are refused
before work starts, with an error message. No setting is ignored silently. In messages and names "served" means
supported: the setting has the same effect as in Megatron-Core.
"""
