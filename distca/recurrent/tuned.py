"""The configurations of fla-core's Triton kernels that are taken on Hopper GPUs.

By default fla-core tries up to 12 configurations of each kernel when it first runs on a machine. That takes minutes to
compile. It would also choose by the tiny inputs of the self-check, which run first. fla-core can read the
configurations from a folder instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

HOPPER = Path(__file__).parent / "tuned_hopper"
"""One file for each kernel, in fla-core's format: block sizes, warps and stages. fla-core's own search chose them on an
H200, with heads of 128 (benchmarks/results/recurrent_configurations.json). Two were chosen on a training step's rows,
and the others on the self-check's few rows. ``python -m benchmarks.recurrent_kernels --search`` takes 65,536 rows."""
LARGEST_HEAD = 128
"""The largest head for which these configurations have run. Larger heads need more of a multiprocessor's memory, which
some configurations may exceed; for them fla-core searches by itself."""
_HOPPER_CAPABILITY = (9, 0)


def use_tuned(device: torch.device, head_dim: int) -> None:
    """Lets fla-core read its configurations from :data:`HOPPER`, in this process.

    Does nothing if the GPU is no Hopper, if heads are too large, or if the user has named another folder in
    FLA_CONFIG_DIR.

    Args:
        device: this rank's GPU.
        head_dim: the larger of the sizes of a key head and a value head.
    """
    if torch.cuda.get_device_capability(device) != _HOPPER_CAPABILITY or "FLA_CONFIG_DIR" in os.environ:
        return
    if head_dim > LARGEST_HEAD:
        return
    from fla.ops.utils import cache

    if cache.FLA_CACHE_MODE is cache.FlaCacheMode.DISABLED:  # fla-core has read the environment when it was imported.
        os.environ["FLA_CONFIG_DIR"] = str(HOPPER)
        cache.FLA_CACHE_MODE = cache.FlaCacheMode.FULL
