"""The NVSHMEM transport: ranks write rows straight into each other's memory, inside a node and between nodes."""
