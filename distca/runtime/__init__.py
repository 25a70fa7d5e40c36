"""The execution of plans: autograd nodes that exchange rows between ranks, and attention on the received rows.

A micro-batch runs in two parts, ping and pong: ping computes while pong's rows travel, and the other way round.
"""

from distca.runtime.device_routes import LayerRoutes, NanoRoutes
from distca.runtime.ping_pong import SplitLayer, run_layers
from distca.runtime.server import AttentionPool

__all__ = ["AttentionPool", "LayerRoutes", "NanoRoutes", "SplitLayer", "run_layers"]
