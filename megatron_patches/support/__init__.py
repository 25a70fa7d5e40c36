"""The parts of megatron-core that core attention disaggregation serves, and the refusal of everything else.

Layers, block, norms and loss are replaced. A setting that changes what Megatron's parts compute, but not what their
replacements compute, is refused before work starts. Nothing is dropped silently.
"""
