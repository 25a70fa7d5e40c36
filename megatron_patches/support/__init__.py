"""The parts of megatron-core that core attention disaggregation serves, and the refusal of everything else.

Layers, block, norms and loss are replaced. Whatever would have changed what the replaced parts compute, and is not
honoured by their replacements, is refused before work starts; nothing is dropped silently.
"""
