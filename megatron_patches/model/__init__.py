"""What is built of a model: its configuration, its kinds of layers, and what Megatron has no field for."""
