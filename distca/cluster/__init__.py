"""Who the other ranks are: host names, node topology, and whether their processes are alive."""
