"""Rows by one-sided writes into symmetric memory: NVSHMEM, inside a node and between nodes."""
