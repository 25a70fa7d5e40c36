"""Measures cost tables when a run starts, if ``cad.cost_table`` is "measure" and no table fits.

A *cost table* has the measured seconds of attention tasks on one kind of device, by one kernel. Planning balances ranks
by it. Servers without a model measure the tables that homes lack for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distca.attention import AttentionSpec, Kernel, choose_kernel
from distca.cluster.agreement import of_ranks, on_all_ranks
from distca.errors import ConfigError, system_words
from distca.plan import AttentionShape
from distca.plan.cost.table_file import find_table, table_name, write_table
from distca.profile.measure import measure_device
from distca.profile.timing import EndedEarlyError
from distca.train.config.schema import MEASURE, RunConfig
from distca.versions import versions

logger = logging.getLogger(__name__)

_LINEAR = "linear layers"
"""The part of a measurement that servers without a model leave out."""
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


def tables_for(config: RunConfig, kernel: Kernel, device: torch.device, rank: int) -> str | None:
    """Returns the folder of cost tables that takes the place of "measure"; all ranks call it together.

    The first rank of each device and kernel measures the table for them, if the package has none and no earlier start
    wrote one. That takes about two minutes on a GPU.

    Args:
        config: of the run.
        kernel: this rank's kernel of core attention.
        device: this rank's device.
        rank: this rank.

    Returns:
        ``output``/cost_tables, or None if the package has all tables and there are no servers without a model.
    """
    assert config.cad.cost_table == MEASURE
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    is_first = of_ranks((name, kernel.name)).index((name, kernel.name)) == rank
    is_there = of_ranks(on_all_ranks(lambda: is_first and _is_there(config, kernel, device, name)))
    if not any(is_there) and not config.cad.servers:
        return None
    folder = Path(config.output) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def _is_there(config: RunConfig, kernel: Kernel, device: torch.device, name: str) -> bool:
    """Measures a table if it has to be; returns False if the package has it."""
    shape = config.attention_shape
    heads = shape.heads, shape.kv_heads, shape.head_dim
    if find_table(name, kernel.name, *heads, value_dim=shape.value_dim) is not None:
        return False
    path = Path(config.output) / FOLDER / table_name(name, kernel.name, *heads, value_dim=shape.value_dim)
    if not path.is_file():
        logger.info(
            "No cost table fits %s and the kernel %s: one is measured, for about two minutes.", name, kernel.name
        )
        _measure(config, kernel, shape, device, path)
    return True


def measured_attention(kernel: Kernel, spec: AttentionSpec) -> dict[str, Any]:
    """Returns the content of a cost table that a server without a model measures: attention, without linear layers."""

    def progress(what: str, _: int) -> Callable[[], None]:
        if what == _LINEAR:
            raise EndedEarlyError
        return lambda: None

    shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, spec.dtype.itemsize, spec.value_dim)
    return _described(measure_device(kernel, shape, spec.device, spec.dtype, hidden=0, ffn=0, progress=progress))


def _measure(config: RunConfig, kernel: Kernel, shape: AttentionShape, device: torch.device, path: Path) -> None:
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    measured = measure_device(
        kernel, shape, device, dtype, hidden=config.model.hidden, ffn=config.model.ffn, progress=lambda *_: lambda: None
    )
    unfinished = path.with_suffix(".unfinished")  # a later start would take half a table for a whole one
    try:
        write_table(unfinished, _described(measured))
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(
            f"output is {config.output}, but the cost table {path} cannot be written ({system_words(error)}); make "
            "room, or change output or cad.cost_table."
        ) from None


def _described(measured: dict[str, Any]) -> dict[str, Any]:
    return {"command": "cad.cost_table measure", "versions": versions(), **measured}
