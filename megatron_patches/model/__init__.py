"""Descriptions of a Megatron model: its configuration, its kinds of layers, and options without a Megatron field."""
