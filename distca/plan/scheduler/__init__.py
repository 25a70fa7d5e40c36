"""Schedulers: they choose the server that computes each range of queries."""
