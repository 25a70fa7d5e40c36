"""Everything that knows megatron-core's insides, and nothing else does. Made for megatron-core 0.16.1 to 0.19."""
