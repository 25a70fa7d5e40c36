"""Transformer Engine's linear layers in Megatron-Core's and in disaggregated layers, in bfloat16 and FP8."""
