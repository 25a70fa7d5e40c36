"""The placement of tokens: the rank on which each lives, and whether it is computed in ping or in pong."""
