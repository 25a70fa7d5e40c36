"""What a run records and draws."""
