"""Writes a run's checkpoints, beside the training where host memory allows it.

A checkpoint counts once every rank's part is on the disk and rank 0 has found all of it; until then it has no mark.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from distca.errors import CheckpointError
from distca.train.checkpoint.checkpoints import FITS_FILE, fits
from distca.train.checkpoint.integrity import FileFacts, describe_files, write_durably
from distca.train.run.run_folder import RunFolder
from distca.words import format_bytes

if TYPE_CHECKING:
    from distca.train.run.builder import Trainer

logger = logging.getLogger(__name__)


class Saver:
    """Saves one checkpoint after the other. All ranks make one together and call its methods together.

    Args:
        trainer: what is trained.
        folder: of the run.
    """

    def __init__(self, trainer: Trainer, folder: RunFolder) -> None:
        from megatron_patches.checkpoint.staging import HostStaging

        self._trainer, self._folder = trainer, folder
        self._staging = HostStaging(trainer.world.device)
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a checkpoint could not be written, which :meth:`finish` raises; ranks may know it at other times."""
        return self._failure is not None

    def save(self, step: int, sampler_state: dict[str, Any], *, wait: bool = False) -> None:
        """Save what training came to after ``step`` steps, once the checkpoint before is written.

        Args:
            step: optimizer steps that are done.
            sampler_state: where the data stood.
            wait: until it is written, as checkpoint.background false does always; takes no more host memory then.

        Raises:
            CheckpointError: on every rank, if one cannot write its part or rank 0 cannot see it; of this checkpoint or
                the one before. What was written is deleted, so that it takes no room.
        """
        from megatron_patches.checkpoint.save_load import save_checkpoint

        began = time.perf_counter()
        self.finish()
        path, trainer, extra = self._folder.checkpoint_path(step), self._trainer, {"step": step}
        logger.info("Saving %s", path)
        with self._alike(path):
            if trainer.world.rank == 0:
                self._folder.clear_checkpoint(step)
        staging = None if wait or not trainer.config.checkpoint.background else self._staging
        with self._alike(path):
            write = save_checkpoint(path, trainer.model, trainer.optimizer, extra | {"sampler": sampler_state}, staging)
        waited = time.perf_counter() - began

        def complete() -> None:
            self._complete(path, step, sampler_state, write)
            if trainer.world.rank == 0:
                size = sum(file.stat().st_size for file in path.iterdir())
                seconds = time.perf_counter() - began
                held = seconds if staging is None else waited
                logger.info(
                    "Saved %s: %s in %.1f s, of which training waited %.1f s", path, format_bytes(size), seconds, held
                )

        if staging is None:
            complete()
        else:
            self._writing = threading.Thread(
                target=self._keep_failure, args=(complete,), name="distca-saver", daemon=True
            )
            self._writing.start()

    def before_update(self) -> None:
        """Lets the optimizer change the tensors that are being copied. It is to be called right before the optimizer's
        step."""
        self._staging.before_update()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: as :meth:`save`.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Give host memory back; nothing is being written any more."""
        self._staging.close()

    def _keep_failure(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failure = error

    def _complete(self, path: Path, step: int, sampler_state: dict[str, Any], write: Callable[[], None]) -> None:
        """Write every rank's part, and mark the checkpoint where all is there."""
        trainer, rank, mine = self._trainer, self._trainer.world.rank, dict[str, FileFacts]()
        with self._alike(path):
            write()
            mine = describe_files(path, [file.name for file in sorted(path.glob(f"__{rank}_*"))])
        everyone: list[Any] = [None] * trainer.world.size
        dist.gather_object(mine, everyone if rank == 0 else None, group=self._staging.group)
        with self._alike(path):
            if rank == 0:
                _check_all_here(path, everyone)
                write_durably(path / FITS_FILE, json.dumps(fits(trainer, sampler_state), indent=1))
                self._folder.mark_complete(step, {name: facts for files in everyone for name, facts in files.items()})
        if rank == 0:
            self._folder.prune(trainer.config.checkpoint.keep, step)

    @contextmanager
    def _alike(self, path: Path) -> Iterator[None]:
        """Raise on every rank, once all are here, what one of them could not write, and delete what was written."""
        from torch.distributed.checkpoint.api import CheckpointException

        world = self._trainer.world
        said: CheckpointError | None = None
        try:
            yield
        except CheckpointError as error:
            said = error
        except CheckpointException as error:
            said = _not_written(path, error.failures)
        except OSError as error:
            said = _not_written(path, {world.rank: (error, None)})
        everyone = [said] * world.size
        dist.all_gather_object(everyone, said, group=self._staging.group)
        failed = next((each for each in everyone if each is not None), None)
        if failed is not None:
            shutil.rmtree(path, ignore_errors=True)
            raise failed


def _not_written(path: Path, failures: Mapping[int, tuple[BaseException, object]]) -> CheckpointError:
    """The error for a checkpoint folder and what went wrong, by rank, with its trace."""
    rank, (cause, _) = next(iter(failures.items()))
    while cause.__context__ is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(nearest).free
    first = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    if not isinstance(cause, OSError) and free < 2**20:  # torch's writer only says where in a file it stopped
        first = os.strerror(errno.ENOSPC)
    return CheckpointError(
        f"{path} could not be written by rank {rank} ({first}); {format_bytes(free)} are free there."
    )


def _check_all_here(path: Path, written: list[dict[str, FileFacts]]) -> None:
    """Refuse a checkpoint of which rank 0 does not find all: each node may have written into a folder of its own."""
    for rank, files in enumerate(written):
        for name, facts in files.items():
            file = path / name
            if not file.is_file() or _size(file) != facts["bytes"]:
                raise CheckpointError(
                    f"Rank {rank} wrote {name} of {path}, which rank 0 does not find there: their nodes do not share "
                    "this folder. Let output name one that they share."
                )


def _size(file: Path) -> int:
    """Bytes of a file that another rank may have written just now."""
    with file.open("rb") as opened:  # network file systems look at the file itself, and not at a memory, when opening
        return os.fstat(opened.fileno()).st_size
