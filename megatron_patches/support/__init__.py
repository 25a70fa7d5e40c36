"""Refuses settings, modules and versions of Megatron-Core that this project does not support.

DistCA computes each piece of softmax attention on any rank that has time for it: *core attention disaggregation*. For
this it replaces Megatron's layers, block, norms and loss. Settings that a replacement does not obey are refused before
work starts, with an error message. No setting is ignored silently. In messages and names "served" means supported: the
setting has the same effect as in Megatron-Core.
"""
