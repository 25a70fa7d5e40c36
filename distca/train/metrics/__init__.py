"""Records and pictures of a run."""
