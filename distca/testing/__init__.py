"""Tools for tests, shipped because users of DistCA test with them too: reference attention, error norms, ranks."""
