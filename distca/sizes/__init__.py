"""Sizes of models that kernels and FP8 products serve; without torch, so that settings and commands may ask."""
