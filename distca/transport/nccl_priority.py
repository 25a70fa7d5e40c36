"""NCCL beside the computation."""

from __future__ import annotations

import os


def nccl_goes_first() -> None:
    """Let kernels of NCCL start before computation that is queued too; call it before any process group is made.

    A GPU gives its multiprocessors to kernels of equal priority as they come, and a long document's core attention
    occupies all of them for up to seconds. A collective that begins just before it on one rank and just after it on
    another then spins on the first until the second is through, on multiprocessors that its attention lacks. Where the
    variable is set already, it stays.
    """
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
