"""Refuses settings and modules of Megatron-Core that this project does not support.

In core attention disaggregation, attention of a rank's tokens is computed on any rank that has time for it. DistCA
replaces Megatron's layers, block, norms and loss for this. Settings that a replacement does not obey are refused with
an error message, before the model runs. ``attached.py`` refuses models that were changed after
``CAD.attach``.
"""
