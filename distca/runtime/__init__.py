"""Running plans: dispatch as autograd launch/wait pairs, in-place attention servers, and the ping-pong order."""

from distca.runtime.device_routes import LayerRoutes, NanoRoutes
from distca.runtime.ping_pong import SplitLayer, run_layers
from distca.runtime.server import AttentionPool

__all__ = ["AttentionPool", "LayerRoutes", "NanoRoutes", "SplitLayer", "run_layers"]
