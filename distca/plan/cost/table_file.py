"""Reads and writes cost tables, and finds the table for a GPU, a kernel and attention heads.

A *cost table* is a JSON file with measured seconds of attention tasks (``table.py``). `distca profile` makes one.
:func:`find_table` looks in the folder ``tables`` next to this file, and :func:`open_table` opens a user's table.
"""

from __future__ import annotations

import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from distca.errors import PlanError
from distca.json_file import read_object
from distca.plan.cost.linear import LinearRate
from distca.plan.cost.model import AttentionShape
from distca.plan.cost.table import LoadFactors, TableCost

logger = logging.getLogger(__name__)

TABLES = Path(__file__).parent / "tables"
_WANTED = ("heads", "kv_heads", "head_dim", "q_rows", "kv_rows", "forward_seconds", "backward_seconds")
"""Every file must have these keys."""
_SIZES = ("heads", "kv_heads", "head_dim", "value_dim", "value_bytes", "block", "window")
_LARGEST = 1 << 20
"""Values of keys in ``_SIZES`` must be whole numbers from 1 to this. Others are refused."""
_SIDES = ("forward", "backward")


def table_name(
    device: str, kernel: str, heads: int, kv_heads: int, head_dim: int, window: int = 0, value_dim: int = 0
) -> str:
    """Returns the file name of a table, such as ``h200_flash4_32x8x128.json``.

    With ``value_dim`` 64 and ``window`` 1,024 the name is ``h200_flash4_32x8x128-64_w1024.json``."""
    short = re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia")).strip("-")
    dims = f"{head_dim}-{value_dim}" if value_dim else head_dim
    return f"{short}_{kernel}_{heads}x{kv_heads}x{dims}{f'_w{window}' if window else ''}.json"


def write_table(path: Path, content: dict[str, Any]) -> None:
    """Writes a table as JSON, with null for nan, and each list of numbers on one line."""
    text = json.dumps(_plain(content), indent=1, allow_nan=False)
    flat = re.sub(r"\[\s+[^\[\]{}]*?\s+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(flat + "\n", encoding="utf-8")


def find_table(
    device: str,
    kernel: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int = 0,
    value_dim: int = 0,
    value_bytes: int = 0,
    folder: Path = TABLES,
) -> TableCost | None:
    """Returns the measured costs of a device and kernel, or None if no table fits.

    A fitting table has the same device, kernel, window, head sizes and query heads per key/value head. Of several
    fitting tables, the one with the nearest number of heads is taken, and its seconds are scaled to ``heads``.

    Args:
        device: the device's name from torch.cuda.get_device_name(), such as "NVIDIA H200".
        kernel: name of the kernel, such as "flash4".
        heads: query heads on one rank.
        kv_heads: key/value heads on one rank.
        head_dim: size of a query or key head.
        window: the number of keys that a query sees; 0 for all keys.
        value_dim: size of a value head; 0 stands for ``head_dim``.
        value_bytes: bytes of one element of q, k, v or o when it travels; 0 takes the bytes of the measurement.

    Raises:
        PlanError: a file in the folder is not a usable table.
    """
    fitting: list[tuple[float, Path, dict[str, Any]]] = []
    for path in sorted(folder.glob("*.json")):
        content = _read_once(path) if folder == TABLES else _read(path)
        same = content.get("device") == device and content.get("kernel") == kernel
        same = same and (content.get("window", 0), content.get("value_dim", 0)) == (window, value_dim)
        if same and content["head_dim"] == head_dim and content["heads"] * kv_heads == content["kv_heads"] * heads:
            fitting.append((abs(np.log(content["heads"] / heads)), path, content))
    if not fitting:
        return None
    _, path, content = min(fitting, key=lambda found: found[:2])
    scale = heads / content["heads"]
    scaled = "" if scale == 1 else f", seconds scaled by {scale:g} for {heads} heads"
    logger.info("Attention costs: measured table %s%s", path.name, scaled)
    return _table(path, content, heads, kv_heads, value_bytes)


def open_table(
    path: str | Path, heads: int, kv_heads: int, head_dim: int, value_dim: int = 0, value_bytes: int = 0
) -> TableCost:
    """Returns the measured costs in a user's file, with seconds scaled to ``heads``.

    Arguments other than ``path`` are as in :func:`find_table`.

    Raises:
        PlanError: the file is not a usable table; or it was measured with a window, or for other head sizes or another
            number of query heads per key/value head.
    """
    content = _read(Path(path))
    if window := content.get("window", 0):
        raise PlanError(
            f"The cost table {path} was measured for layers with a window of {window:,}, but this setting is for "
            f"the table of layers without a window; put the file into {TABLES}, where tables of windows are looked for."
        )
    own = (content["heads"], content["kv_heads"], content["head_dim"], content.get("value_dim", 0))
    if own[2:] != (head_dim, value_dim) or own[0] * kv_heads != own[1] * heads:
        raise PlanError(
            f"The cost table {path} was measured for {own[0]} query heads, {own[1]} key/value heads and head size "
            f"{_size(*own[2:])}, but a rank of this model has {heads}, {kv_heads} and {_size(head_dim, value_dim)}; "
            "measure these with `distca profile`."
        )
    return _table(Path(path), content, heads, kv_heads, value_bytes)


def _size(head_dim: int, value_dim: int) -> str:
    return f"{head_dim} with values of {value_dim}" if value_dim else str(head_dim)


def load_table(path: str | Path) -> TableCost:
    """Returns the measured costs in a file, for the number of heads with which they were measured.

    - The file must have heads, kv_heads, head_dim, q_rows [Q], kv_rows [V], forward_seconds and backward_seconds
      [Q][V]. Entry [i][j] has the seconds a task of q_rows[i] and kv_rows[j] adds to a kernel call; null if unknown.
    - It may have block, value_dim, value_bytes and window.
    - It may have load_factors, with the lists kv_rows, forward and backward (:class:`LoadFactors`).
    - It may have linear, with hidden, ffn, forward_s_per_token, backward_s_per_token and fp8 (:class:`LinearRate`).

    Raises:
        PlanError: there is no such file, a key is missing, or a value is not usable.
    """
    content = _read(Path(path))
    return _table(Path(path), content, content["heads"], content["kv_heads"])


@cache
def _read_once(path: Path) -> dict[str, Any]:
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_object(path)
    except OSError as error:
        raise PlanError(f"The cost table {path} cannot be read ({error.strerror}); give another file.") from None
    except ValueError as error:
        raise PlanError(f"The cost table {path} is not JSON ({error}); `distca profile` writes one.") from None
    missing = [key for key in _WANTED if key not in content]
    if missing:
        raise PlanError(f"The cost table {path} lacks {', '.join(missing)}; measure it again with `distca profile`.")
    for key in _SIZES:
        if key in content and (type(content[key]) is not int or not 1 <= content[key] <= _LARGEST):
            raise PlanError(
                f"The cost table {path} has {key} {content[key]!r}, which must be a whole number of at least 1 and at "
                f"most {_LARGEST:,}; measure it again with `distca profile`."
            )
    return content


def _table(path: Path, content: dict[str, Any], heads: int, kv_heads: int, value_bytes: int = 0) -> TableCost:
    try:
        q_rows, kv_rows = (np.asarray(content[key], np.float64) for key in ("q_rows", "kv_rows"))
        scale = heads / content["heads"]
        forward, backward = (np.asarray(content[f"{side}_seconds"], np.float64) * scale for side in _SIDES)
        sizes = content["head_dim"], value_bytes or content.get("value_bytes", 2), content.get("value_dim", 0)
        shape = AttentionShape(heads, kv_heads, *sizes)
        block, load = content.get("block", 128), LoadFactors.of(content)
        # LinearRate has seconds per token and weight, which do not depend on heads.
        return TableCost(
            shape, q_rows, kv_rows, forward, backward, block, load, LinearRate.of(content), content.get("window", 0)
        )
    except PlanError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise PlanError(
            f"The cost table {path} has something else where numbers should be ({error}); measure it again with "
            "`distca profile`."
        ) from None


def _plain(value: Any) -> Any:
    """Returns ``value`` for JSON: arrays become lists, nan becomes None, floats are rounded to six digits."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return None if np.isnan(value) else float(f"{value:.6g}")
    return value
