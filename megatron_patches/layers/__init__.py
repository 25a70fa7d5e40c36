"""Megatron's layers, cut at core attention or at a recurrence, and the block and the stack that run cut layers.

Layers that are not cut have the forward of ``packed_attention.py`` as core attention. ``full_recompute.py`` recomputes
them.
"""
