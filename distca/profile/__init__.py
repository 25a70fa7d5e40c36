"""Measured costs: what kernels, linear layers and links take on this machine, as tables that planning reads."""
