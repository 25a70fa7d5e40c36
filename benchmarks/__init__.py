"""Measurements. Scripts run from the repository's root; packages as ``python -m benchmarks.NAME``."""
