"""The data that a step trains on."""
