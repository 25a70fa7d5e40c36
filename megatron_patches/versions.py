"""The megatron-core that is installed, found without importing it, and whether this project knows it.

What differs between the supported versions is told apart by signatures and missing modules, where it matters; the range
here says how far that was tested.
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
    """Version of the megatron-core that an import would take, "0.16.1"; None without one.

    It may be a folder of sources on PYTHONPATH, which pip does not know, so it is read from the sources: importing them
    takes seconds.
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
    """Refuse a megatron-core that this project does not know, before anything of it is imported.

    Raises:
        VersionError: it is missing or outside of the supported versions.
    """
    if reason := why_not_supported():
        raise VersionError(f"megatron-core is {reason}.")


_DROPPED = {
    # HybridModel follows it.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # It makes the same one itself.
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # Of checkpoints that earlier versions wrote.
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
}


def drop_log_lines() -> None:
    """Keep these lines out of the log, from now on; harmless to call again."""
    for name in _DROPPED:
        logging.getLogger(name).addFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_DROPPED[record.name])
