"""Distributed checkpoints of model and optimizer by Megatron-Core."""
