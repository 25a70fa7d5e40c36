"""Runs plans: autograd nodes exchange rows between ranks, and compute attention and recurrences.

``megatron_patches/`` runs Megatron-Core's layers with this package, which does not import Megatron-Core.
"""

from distca.runtime.device_routes import LayerRoutes, NanoRoutes
from distca.runtime.ping_pong import SplitLayer, run_layers
from distca.runtime.server import AttentionPool

__all__ = ["AttentionPool", "LayerRoutes", "NanoRoutes", "SplitLayer", "run_layers"]
