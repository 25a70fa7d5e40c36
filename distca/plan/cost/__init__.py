"""Seconds that attention takes: analytic models and measured tables."""
