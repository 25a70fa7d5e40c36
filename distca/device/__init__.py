"""Helpers for one device: host-to-device copies, clocks, host memory. Nothing here knows of ranks or plans."""
