"""Cost models, which tell the planner the seconds of attention and of linear layers: formulas and measured tables."""
