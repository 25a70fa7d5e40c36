"""Mixtures of experts: Megatron's routers and experts, in layers that are cut at core attention."""
