"""A step that runs: its schedule, its forward and backward, and the optimizer."""
