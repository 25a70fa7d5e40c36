"""Cost models, by which the planner knows the seconds of attention and of linear layers: formulas and measured
tables."""
