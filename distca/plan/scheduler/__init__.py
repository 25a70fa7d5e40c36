"""Which server computes which range of queries."""
