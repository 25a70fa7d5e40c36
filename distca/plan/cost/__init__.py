"""The seconds that attention and linear layers take: analytic models and measured tables."""
