"""The configurations of fla-core's Triton kernels that were fastest on Hopper GPUs.

By itself fla-core tries up to 12 configurations of each kernel at a machine's first start. That compiles for minutes,
and the tiny pieces of a self-check decide. fla-core can read chosen configurations from a folder instead.
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
    """Let fla-core take the configurations of this GPU, if they are known and the user has not named others.

    Args:
        device: this rank's GPU. The setting holds for the process.
    """
    if torch.cuda.get_device_capability(device) != _HOPPER_CAPABILITY or "FLA_CONFIG_DIR" in os.environ:
        return
    from fla.ops.utils import cache

    if cache.FLA_CACHE_MODE is cache.FlaCacheMode.DISABLED:  # read from the environment, perhaps long before
        os.environ["FLA_CONFIG_DIR"] = str(HOPPER)
        cache.FLA_CACHE_MODE = cache.FlaCacheMode.FULL
