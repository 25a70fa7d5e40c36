"""The configurations of fla-core's Triton kernels that were fastest on Hopper GPUs.

By default fla-core tries up to 12 configurations of each kernel when it first runs on a machine. That takes minutes to
compile. It would also choose by the tiny inputs of the self-check, which run first. fla-core can read the
configurations from a folder instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

HOPPER = Path(__file__).parent / "tuned_hopper"
"""One file for each kernel, in fla-core's format: block sizes, warps and stages. ``python -m
benchmarks.recurrent_kernels --search`` finds them, on pieces of 65,536 rows with the heads of Qwen3.5-9B."""
_HOPPER_CAPABILITY = (9, 0)


def use_tuned(device: torch.device) -> None:
    """Lets fla-core read its configurations from :data:`HOPPER`, in this process.

    Does nothing if the GPU is no Hopper, or if the user has named another folder in FLA_CONFIG_DIR.

    Args:
        device: this rank's GPU.
    """
    if torch.cuda.get_device_capability(device) != _HOPPER_CAPABILITY or "FLA_CONFIG_DIR" in os.environ:
        return
    from fla.ops.utils import cache

    if cache.FLA_CACHE_MODE is cache.FlaCacheMode.DISABLED:  # fla-core has read the environment when it was imported.
        os.environ["FLA_CONFIG_DIR"] = str(HOPPER)
        cache.FLA_CACHE_MODE = cache.FlaCacheMode.FULL
