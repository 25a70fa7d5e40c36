"""Disaggregated training held against unmodified Megatron-Core."""
