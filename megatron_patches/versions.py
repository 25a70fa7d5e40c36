"""The megatron-core that is installed, found without importing it, and whether this project supports it.

Code that depends on the version looks at signatures and missing modules, where it needs to. The range here says which
versions were tested.
"""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path

from distca.errors import VersionError

SUPPORTED = ">=0.16.1,<0.20"
_FIRST, _BEYOND = (0, 16, 1), (0, 20, 0)


def installed_version() -> str | None:
    """Returns the version of the megatron-core that an import would take, such as "0.16.1"; None without one.

    It is read from the sources: they may be a folder on PYTHONPATH that pip does not know, and importing them takes
    seconds.
    """
    try:
        found = find_spec("megatron.core")
    except ModuleNotFoundError:  # there is no package megatron either
        return None
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("package_info.py").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


def why_not_supported() -> str | None:
    """Returns, in words, the megatron-core that is here and the one that is needed; None if it can be used."""
    version = installed_version()
    if version is not None and _FIRST <= tuple(map(int, version.split("."))) < _BEYOND:
        return None
    return f"{version or 'not installed'}; versions {SUPPORTED} are supported"


def has_gated_delta_net() -> bool:
    """Whether the gated delta net that our layers are built with is there, which is so since 0.19."""
    version = installed_version()
    return version is not None and tuple(map(int, version.split("."))) >= (0, 19)


def check_version() -> None:
    """Refuses an unsupported megatron-core, before any of it is imported.

    Raises:
        VersionError: megatron-core is missing, or its version is not supported.
    """
    if reason := why_not_supported():
        raise VersionError(f"megatron-core is {reason}.")


_DROPPED = {
    # This project serves both models.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # Megatron makes the same layout itself.
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # Megatron calls it to read checkpoints of earlier versions.
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
}


def drop_log_lines() -> None:
    """Keeps these lines out of the log from now on; it may be called again."""
    for name in _DROPPED:
        logging.getLogger(name).addFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_DROPPED[record.name])
