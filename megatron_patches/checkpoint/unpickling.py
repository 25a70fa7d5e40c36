"""Lets torch and Megatron read checkpoints without running code in them.

torch uses ``pickle.load`` for the file ``.metadata``, which describes tensors, and ``weights_only=False`` for objects
that are no tensors. Both would run any function that a file names; inside :func:`readable`, such a file is refused.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeVar

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from megatron_patches.checkpoint.metadata_file import check_files, forget_metadata, read_metadata

T = TypeVar("T")


class UnreadableError(Exception):
    """A checkpoint cannot be read. The message gives the reason, to which callers add which checkpoint it is."""


def check_small_files(checkpoint: Path) -> Metadata:
    """Reads a checkpoint's ``.metadata``, which is returned, and its common.pt and metadata.json if present.

    The files that ``.metadata`` describes must be there and large enough; they are not read.

    Raises:
        pickle.UnpicklingError: a file cannot be read, names functions to run, or does not fit ``.metadata``.
    """
    metadata = _read(checkpoint / ".metadata", read_metadata)
    check_files(checkpoint, metadata)
    for name, read in (("common.pt", _load_tensors), ("metadata.json", _load_format)):
        if os.path.lexists(checkpoint / name):  # newer versions of Megatron do not write common.pt
            _read(checkpoint / name, read)
    return metadata


def _read(path: Path, read: Callable[[BinaryIO], T]) -> T:
    try:
        if path.exists() and not path.is_file():  # opening a named pipe would wait for a writer
            raise pickle.UnpicklingError("it is no regular file")
        with path.open("rb") as file:
            return read(file)
    except pickle.UnpicklingError as error:
        said = (str(error).splitlines() or ["it is damaged"])[0]
        raise pickle.UnpicklingError(said if path.name == ".metadata" else f"{path.name}: {said}") from None
    except Exception as error:
        words = str(error).splitlines() or [type(error).__name__]
        raise pickle.UnpicklingError(f"{path.name} cannot be read ({words[0]})") from None


@contextmanager
def readable() -> Iterator[None]:
    """A context in which torch runs no code from checkpoints.

    Raises:
        UnreadableError: a file is damaged, or names functions to run. No function was run.
    """
    try:
        with only_data():
            yield
        return
    # torch's CheckpointException derives from BaseException, and holds every rank's error.
    except CheckpointException as error:
        cause: BaseException = next(iter(error.failures.values()))[0]
    except (pickle.UnpicklingError, OSError, EOFError, CheckpointingException) as error:
        cause = error
    words = str(cause).splitlines()
    raise UnreadableError(words[0] if words else type(cause).__name__) from None


@contextmanager
def only_data() -> Iterator[None]:
    """A context like :func:`readable` that leaves errors as torch raises them."""
    restricted = SimpleNamespace(**{name: getattr(pickle, name) for name in ("dump", "dumps")}, load=read_metadata)
    before = filesystem.pickle, DefaultLoadPlanner.load_bytes
    filesystem.pickle, DefaultLoadPlanner.load_bytes = restricted, _load_bytes  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        filesystem.pickle, DefaultLoadPlanner.load_bytes = before  # type: ignore[method-assign]
        forget_metadata()


def _load_format(file: BinaryIO) -> CheckpointingConfig:
    found = CheckpointingConfig(**json.load(file))
    if not all(isinstance(value, str | int) for value in vars(found).values()):
        raise ValueError("its values must be texts and whole numbers")
    return found


def _load_tensors(file: BinaryIO) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _load_bytes(planner: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
    """Replaces DefaultLoadPlanner.load_bytes, which reads with ``weights_only=False``."""
    name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], loaded)
    else:
        planner.state_dict[name] = loaded
