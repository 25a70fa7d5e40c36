"""Megatron's layers, cut at core attention or at a recurrence, and the modules that run all layers of a model.

These modules are the block of a GPTModel and the stack of a HybridModel. If each rank computes only its own core
attention (``CAD(disaggregate=False)``), ``packed_attention.py`` computes it inside each layer.
``full_recompute.py`` then recomputes whole layers of a GPTModel.
"""
