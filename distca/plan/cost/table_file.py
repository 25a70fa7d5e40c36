"""Cost tables as files: named after device, kernel and heads, found by them again. numpy only.

Tables of this package lie in ``distca/profile/tables/``; put a file of `distca profile` there and training finds it.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np

from distca.errors import PlanError
from distca.plan import AttentionShape, TableCost
from distca.plan.cost.model import LinearRate
from distca.plan.cost.table import LoadFactors, load_table

logger = logging.getLogger(__name__)

TABLES = Path(__file__).parent / "tables"


def table_name(device: str, kernel: str, heads: int, kv_heads: int, head_dim: int) -> str:
    """File name of a table, such as ``h200_flash4_32x8x128.json``."""
    short = re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia")).strip("-")
    return f"{short}_{kernel}_{heads}x{kv_heads}x{head_dim}.json"


def write_table(path: Path, content: dict[str, Any]) -> None:
    """Write a table; nan becomes null and a list of numbers takes one line."""
    text = json.dumps(_plain(content), indent=1, allow_nan=False)
    flat = re.sub(r"\[\s+[^\[\]{}]*?\s+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(flat + "\n", encoding="utf-8")


def find_table(
    device: str, kernel: str, heads: int, kv_heads: int, head_dim: int, *, folder: Path = TABLES
) -> TableCost | None:
    """The measured costs of a device and kernel, or None if nobody measured them.

    A table fits if its head size and its query heads per key/value head are the same. Heads are independent of each
    other, so seconds are scaled by their number; of several fitting tables the one with the nearest number is taken.

    Args:
        device: as torch.cuda.get_device_name() says it, such as "NVIDIA H200".
        kernel: name of the kernel, such as "flash4".
        heads: query heads on one rank.
        kv_heads: key/value heads on one rank.
        head_dim: size of a head.
        folder: where tables lie.

    Raises:
        PlanError: a fitting file is not a usable table.
    """
    fitting: list[tuple[float, str, dict[str, Any]]] = []
    for path in sorted(folder.glob("*.json")):
        content = _read(path)
        same = content.get("device") == device and content.get("kernel") == kernel
        if same and content["head_dim"] == head_dim and content["heads"] * kv_heads == content["kv_heads"] * heads:
            fitting.append((abs(np.log(content["heads"] / heads)), path.name, content))
    if not fitting:
        return None
    _, name, content = min(fitting, key=lambda found: found[:2])
    scale = heads / content["heads"]
    scaled = "" if scale == 1 else f", seconds scaled by {scale:g} for {heads} heads"
    logger.info("Attention costs: measured table %s%s", name, scaled)
    return _scaled(content, AttentionShape(heads, kv_heads, head_dim, content.get("value_bytes", 2)), scale)


def open_table(path: str | Path, heads: int, kv_heads: int, head_dim: int) -> TableCost:
    """The measured costs of a file, for so many heads; its head size and query heads per key/value head must be these.

    Raises:
        PlanError: the file is not a usable table, or one of other heads.
    """
    table = load_table(path)
    shape = table.shape
    if shape.head_dim != head_dim or shape.heads * kv_heads != shape.kv_heads * heads:
        raise PlanError(
            f"The cost table {path} was measured for {shape.heads} query heads, {shape.kv_heads} key/value heads and "
            f"head size {shape.head_dim}, but a rank of this model has {heads}, {kv_heads} and {head_dim}; measure "
            "these with `distca profile`."
        )
    content = _read(Path(path))
    wanted = AttentionShape(heads, kv_heads, head_dim, shape.value_bytes)
    return _scaled(content, wanted, heads / shape.heads)


def _scaled(content: dict[str, Any], shape: AttentionShape, scale: float) -> TableCost:
    q_rows, kv_rows = (np.array(content[key], float) for key in ("q_rows", "kv_rows"))
    forward, backward = (np.array(content[key], float) * scale for key in ("forward_seconds", "backward_seconds"))
    block, load = content["block"], LoadFactors.of(content)
    # Seconds per weight are the same for any number of heads.
    return TableCost(shape, q_rows, kv_rows, forward, backward, block, load, LinearRate.of(content))


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    wanted = ("heads", "kv_heads", "head_dim", "block", "q_rows", "kv_rows", "forward_seconds", "backward_seconds")
    missing = [key for key in wanted if key not in content]
    if missing:
        raise PlanError(f"The cost table {path} lacks {', '.join(missing)}; measure it again with `distca profile`.")
    return content


def _plain(value: Any) -> Any:
    """JSON values: arrays become lists, nan becomes None, floats keep six digits."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return None if np.isnan(value) else float(f"{value:.6g}")
    return value
