"""The other ranks: host names, node topology, and whether their processes are alive."""
