"""Fused operations of a transformer in torch and Triton, which do not depend on Megatron."""
