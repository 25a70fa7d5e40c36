"""Finds the installed version of Megatron-Core without an import, and checks whether that version is supported.

This file also drops three lines of Megatron-Core from the log.
"""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path

from distca.errors import VersionError

SUPPORTED = ">=0.16.1,<0.20"
"""The supported versions, as pip writes them; 0.16.1 and 0.19.2 are tested."""
_FIRST, _BEYOND = (0, 16, 1), (0, 20, 0)


def installed_version() -> str | None:
    """Returns the version of Megatron-Core that an import would load, such as "0.16.1"; None if none is installed.

    The version is read from a source file. An import would take seconds, and ``importlib.metadata`` does not know
    folders on PYTHONPATH.
    """
    try:
        found = find_spec("megatron.core")
    except ModuleNotFoundError:  # the parent package megatron is missing
        return None
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("package_info.py").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


def why_not_supported() -> str | None:
    """Returns None if the installed version is supported, else a text such as "0.15.0; versions … are supported"."""
    version = installed_version()
    if version is not None and _FIRST <= tuple(map(int, version.split("."))) < _BEYOND:
        return None
    return f"{version or 'not installed'}; versions {SUPPORTED} are supported"


def has_gated_delta_net() -> bool:
    """Whether Megatron-Core is 0.19 or later, which has the gated delta net that this project's layer extends."""
    version = installed_version()
    return version is not None and tuple(map(int, version.split("."))) >= (0, 19)


def check_version() -> None:
    """Raises VersionError if megatron-core is missing, or if this project does not support its version."""
    if reason := why_not_supported():
        raise VersionError(f"megatron-core is {reason}.")


# For each logger, the beginning of a line that is dropped.
_DROPPED = {
    # This project supports both GPTModel and its successor, HybridModel.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # Without full_param_layout, Megatron-Core makes the same layout itself.
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # Megatron-Core itself calls load_common, to read checkpoints of earlier versions.
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
}


def drop_log_lines() -> None:
    """Keeps the lines of ``_DROPPED`` out of the log from now on."""
    for name in _DROPPED:
        logging.getLogger(name).addFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_DROPPED[record.name])
