"""Scripts to begin with."""
