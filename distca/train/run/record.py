"""The records of a run folder's starts: the console's log, and with what, where and from which commit the run went.

console.log    what rank 0 said, of all starts
ranks/         the same of every other rank, a file each
starts.json    of every start: command, time, hosts of the ranks, versions, commit
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distca.log import hand_over_early_lines
from distca.train.run.run_folder import RunFolder
from distca.versions import hardware, versions

logger = logging.getLogger(__name__)


def record_start(folder: RunFolder, rank: int, size: int) -> None:
    """Add this start to starts.json; every rank calls it. What cannot be written is warned about."""
    hosts = [""] * size
    dist.all_gather_object(hosts, socket.gethostname())
    if rank:
        return
    start = {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "ranks": size,
        "hosts": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        "hardware": hardware(size),
        "versions": versions(),
        "commit": commit_of(Path(__file__).parents[3]),
    }
    try:
        folder.starts.write_text(json.dumps([*_earlier(folder.starts), start], indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written (%s).", folder.starts, error.strerror)


def _earlier(file: Path) -> list[Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def commit_of(project: Path) -> str | None:
    """The commit of a checkout, with "changed" behind it where files differ; None outside of one, or without git."""
    if not (project / ".git").exists():
        return None
    try:
        said = [
            subprocess.run(["git", *words], cwd=project, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return said[0].strip() + (", changed" if said[1].strip() else "")


@contextmanager
def rank_log(folder: RunFolder, rank: int) -> Iterator[None]:
    """Keep what this rank logs inside, and before in :func:`distca.log.early_lines`, in a file too: rank 0's in
    console.log, that of others, who say less on the console, in one of their own."""
    file = folder.log_of(rank)
    try:
        file.parent.mkdir(exist_ok=True)
        handler = _LogFile(file, encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written (%s).", file, error.strerror)
        hand_over_early_lines(logging.NullHandler())
        yield
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    hand_over_early_lines(handler)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        with suppress(OSError):  # which was said before
            handler.close()


class _LogFile(logging.FileHandler):
    """A log file that says once that it cannot be written, where Python's writes a traceback for every line."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            logger.warning("%s cannot be written (%s); lines may be missing there.", self.baseFilename, error.strerror)
