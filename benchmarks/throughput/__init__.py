"""Full training steps of DistCA and of every baseline, on the same global batches, in one start of the ranks.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.throughput --output logs -- --config configs/llama-8b.yaml

See benchmarks/README.md for what the figures mean.
"""
