"""Scheduling: the choice of the rank that computes the attention of each range of queries."""
