"""A step before it runs: its documents, its plan, and this rank's rows."""
