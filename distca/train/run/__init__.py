"""A run, from the command line to the last step."""
