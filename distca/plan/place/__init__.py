"""Which tokens live on which rank, and which are computed in ping and which in pong."""
