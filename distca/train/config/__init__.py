"""Settings of a run: schema, parsing, checks."""
