"""Helpers for one rank's device: copies between host and GPU, clocks, events and host memory."""
