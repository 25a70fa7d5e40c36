"""The execution of plans: autograd nodes that send rows and wait for them, attention servers, and the ping-pong order.

Ping and pong are the two parts of a micro-batch, of which one computes while the other's rows travel.
"""

from distca.runtime.device_routes import LayerRoutes, NanoRoutes
from distca.runtime.ping_pong import SplitLayer, run_layers
from distca.runtime.server import AttentionPool

__all__ = ["AttentionPool", "LayerRoutes", "NanoRoutes", "SplitLayer", "run_layers"]
