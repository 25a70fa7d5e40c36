"""Layers that are cut at their core attention, and the block that runs these layers."""
