"""Measures a cost table when a run starts, if ``cad.cost_table`` is "measure" and no table fits.

A *cost table* has the measured seconds of attention tasks on one kind of device. Planning balances ranks by it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from distca.attention import AttentionSpec, Kernel, choose_kernel
from distca.plan import AttentionShape
from distca.plan.cost.table_file import find_table, table_name, write_table
from distca.profile.measure import measure_device
from distca.train.config.schema import MEASURE, RunConfig
from distca.versions import versions

logger = logging.getLogger(__name__)

FOLDER = "cost_tables"
"""The folder of measured tables, beside the runs in ``output``."""


def kernel_of(config: RunConfig, device: torch.device) -> Kernel:
    """Returns the kernel that the run will choose; all ranks call it together."""
    shape, bf16 = config.attention_shape, config.train.precision == "bf16"
    spec = AttentionSpec(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        torch.bfloat16 if bf16 else torch.float32,
        device,
        kinds=tuple(dict.fromkeys(config.model.attention_kinds)),
        deterministic=config.cad.deterministic,
        value_dim=shape.value_dim,
    )
    return choose_kernel(config.cad.kernel, spec)


def table_for(config: RunConfig, kernel: Kernel, device: torch.device) -> str | None:
    """Returns the file of the cost table that takes the place of "measure"; rank 0 calls it.

    Args:
        config: of the run.
        kernel: the run's kernel of core attention.
        device: this rank's device.

    Returns:
        None if the package has a table for this device, kernel and heads. Otherwise a file in ``output``/cost_tables,
        which an earlier start wrote or which is measured now. That takes about two minutes on a GPU.
    """
    assert config.cad.cost_table == MEASURE
    shape = config.attention_shape
    heads = shape.heads, shape.kv_heads, shape.head_dim
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if find_table(name, kernel.name, *heads, value_dim=shape.value_dim) is not None:
        return None
    path = Path(config.output) / FOLDER / table_name(name, kernel.name, *heads, value_dim=shape.value_dim)
    if not path.is_file():
        logger.info(
            "No cost table fits %s and the kernel %s: one is measured, for about two minutes.", name, kernel.name
        )
        _measure(config, kernel, shape, device, path)
    logger.info("Attention costs: measured table %s", path)
    return str(path)


def _measure(config: RunConfig, kernel: Kernel, shape: AttentionShape, device: torch.device, path: Path) -> None:
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    measured = measure_device(
        kernel, shape, device, dtype, hidden=config.model.hidden, ffn=config.model.ffn, progress=lambda *_: lambda: None
    )
    write_table(path, {"command": "cad.cost_table measure", "versions": versions(), **measured})
