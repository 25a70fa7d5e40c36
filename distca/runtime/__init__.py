"""Running plans: rows sent and awaited by autograd nodes, attention servers on every rank, and the ping-pong order."""

from distca.runtime.device_routes import LayerRoutes, NanoRoutes
from distca.runtime.ping_pong import SplitLayer, run_layers
from distca.runtime.server import AttentionPool

__all__ = ["AttentionPool", "LayerRoutes", "NanoRoutes", "SplitLayer", "run_layers"]
