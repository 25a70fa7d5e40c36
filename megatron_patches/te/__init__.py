"""Transformer Engine's linear layers in place of Megatron's own, in bfloat16 and FP8."""
