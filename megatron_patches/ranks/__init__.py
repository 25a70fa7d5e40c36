"""This process among the ranks: its device and Megatron's process groups."""
