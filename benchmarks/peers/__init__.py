"""The ways to train without DistCA: unmodified Megatron-Core with Transformer Engine's layers, on the same batches.

DistCA replaces parts of Megatron-Core in a process, so these modes have a start of their own, which imports nothing of
``megatron_patches``. It adds them to the benchmark.json that the other modes' start wrote.
"""
