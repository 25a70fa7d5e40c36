"""Whether a checkpoint is what was saved, by the bytes and checksums of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distca.errors import DamagedCheckpointError, system_words
from distca.json_file import read_object

COMPLETE = "COMPLETE"
"""Marks a checkpoint that every rank has written; holds the bytes and checksum of each of its files."""
DAMAGED = "DAMAGED"
"""Marks a checkpoint of which a checksum was wrong, so that none goes on from it or keeps it in place of an intact one;
says what is wrong."""
FileFacts = dict[str, Any]
"""Facts of a file: its "bytes" and, in hexadecimal digits, its "sha256"."""


def files_of(checkpoint: Path) -> list[str]:
    """Names of all files of a checkpoint, from its folder on."""
    return sorted(file.relative_to(checkpoint).as_posix() for file in checkpoint.rglob("*") if file.is_file())


def describe_files(checkpoint: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Bytes and SHA-256 of files of a checkpoint, which are read."""
    facts: dict[str, FileFacts] = {}
    for name in names:
        with (checkpoint / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            facts[name] = {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}
    return facts


def write_durably(path: Path, text: str) -> None:
    """Write a file that is there after the power fails, once this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Let a folder's names be on the disk once this returns."""
    with suppress(OSError):  # some file systems of a network cannot
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def sync_files(checkpoint: Path, names: Iterable[str]) -> None:
    """Let files be on the disk once this returns."""
    for name in names:
        with (checkpoint / name).open("rb") as file:
            os.fsync(file.fileno())


def check_undamaged(checkpoint: Path) -> None:
    """Compare the files of a complete checkpoint with the sizes that they were saved with.

    Raises:
        DamagedCheckpointError: naming the first file that differs, or what a checksum has shown before.
    """
    with suppress(OSError):  # a full disk may have left it empty
        said = (checkpoint / DAMAGED).read_text(encoding="utf-8", errors="replace")
        raise damaged(checkpoint, said or "a checksum was wrong")
    check_sizes(checkpoint)


def check_sizes(checkpoint: Path) -> None:
    """The same, whatever was found before.

    Raises:
        DamagedCheckpointError: naming the first file that differs.
    """
    for name, facts in _saved_facts(checkpoint).items():
        file = checkpoint / name
        if not file.is_file():
            raise damaged(checkpoint, f"{name} is missing")
        if file.stat().st_size != facts["bytes"]:
            raise damaged(checkpoint, f"{name} has {file.stat().st_size:,} bytes, not {facts['bytes']:,}")


def check_contents(checkpoint: Path, part: int = 0, parts: int = 1) -> None:
    """Compare the files of a complete checkpoint with the checksums that they were saved with, and mark it where one is
    wrong.

    Args:
        checkpoint: its folder.
        part: which part of the files, from 0, of about equally many bytes.
        parts: how many parts there are, each of which another rank may look at.

    Raises:
        DamagedCheckpointError: naming the first file that differs.
    """
    saved = _saved_facts(checkpoint)
    by_size = sorted(saved, key=lambda name: (-int(saved[name]["bytes"]), name))
    for name in by_size[part::parts]:
        if "sha256" not in saved[name]:
            continue  # of an early version
        try:
            found = describe_files(checkpoint, [name])[name]
        except OSError as error:
            raise damaged(checkpoint, f"{name} cannot be read ({system_words(error)})") from None
        if found != saved[name]:
            said = f"{name} is not what was saved, as its checksum shows"
            with suppress(OSError):
                (checkpoint / DAMAGED).write_text(said, encoding="utf-8")
            raise damaged(checkpoint, said)


def clear_mark(checkpoint: Path) -> None:
    """Forget what a checksum has shown of a checkpoint that somebody mended.

    Raises:
        DamagedCheckpointError: its mark cannot be deleted.
    """
    mark = checkpoint / DAMAGED
    if not mark.exists():
        return
    try:
        mark.unlink()
    except OSError as error:
        raise DamagedCheckpointError(
            f"{checkpoint} is what was saved, but {mark} cannot be deleted ({system_words(error)}), and no run goes "
            "on from a marked one. Delete the mark."
        ) from None


def _saved_facts(checkpoint: Path) -> dict[str, FileFacts]:
    """Returns the facts of every file, by name, as COMPLETE has them; early versions had only the bytes."""
    unreadable = damaged(checkpoint, f"its {COMPLETE} cannot be read")
    try:
        saved = read_object(checkpoint / COMPLETE)
        facts = {str(name): {"bytes": each} if isinstance(each, int) else dict(each) for name, each in saved.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise unreadable from None
    if not facts or not all(isinstance(each.get("bytes"), int) for each in facts.values()):
        raise unreadable
    return facts


def damaged(checkpoint: Path, what: str) -> DamagedCheckpointError:
    """Returns the error for a checkpoint in which ``what`` is wrong."""
    return DamagedCheckpointError(f"{checkpoint} is damaged: {what}. Delete this folder.")
