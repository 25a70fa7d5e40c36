"""Triton kernels for the elementwise work at home; imported on GPUs only, everything has a plain torch version too."""
