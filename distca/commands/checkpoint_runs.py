"""``distca checkpoint``: look at the checkpoints of a run, compare them with their checksums, delete old ones."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from distca.commands.options import check_least
from distca.errors import DamagedCheckpointError, OptionError, StuckCheckpointError
from distca.log import printer
from distca.train.checkpoint.integrity import (
    COMPLETE,
    check_contents,
    check_sizes,
    check_undamaged,
    clear_mark,
    files_of,
)
from distca.train.run.folder_choice import hold
from distca.train.run.run_folder import Checkpoint, RunFolder
from distca.words import count, format_bytes

__all__ = ["list_checkpoints", "prune", "verify"]

_GO_ON = "delete the folders that are named as damaged; a run that resumes takes the newest intact checkpoint."


def verify(path: str) -> None:
    """Read a checkpoint, or all of a run, and compare every file with the checksum it was saved with.

    A damaged one is marked: no run goes on from it, and prune does not count it.

    Args:
        path: folder of a run, or of one of its checkpoints.
    """
    console, damaged = printer(), 0
    checkpoints = _checkpoints(path)
    for checkpoint in checkpoints:
        began = time.perf_counter()
        try:
            check_sizes(checkpoint.path)
            check_contents(checkpoint.path)
            clear_mark(checkpoint.path)
        except DamagedCheckpointError as error:
            damaged += 1
            console.print(str(error), soft_wrap=True)
            continue
        size, seconds = format_bytes(_size(checkpoint.path)), time.perf_counter() - began
        console.print(f"{checkpoint.path} is what was saved: {size}, read in {seconds:.1f} s", soft_wrap=True)
    if damaged:
        raise DamagedCheckpointError(
            f"{damaged} of {count(len(checkpoints), 'checkpoint')} of {path} cannot be used.",
            _GO_ON if damaged < len(checkpoints) or _has_others(checkpoints) else None,
        )


def list_checkpoints(path: str) -> None:
    """Print the checkpoints of a run, also those that were not finished. No weights are read.

    Args:
        path: folder of a run.
    """
    from rich.table import Table

    table = Table(title=f"Checkpoints of {path}")
    for name in ("step", "size", "saved", "state"):
        table.add_column(name, justify="right" if name in ("step", "size") else "left")
    for folder in _run(path).checkpoint_folders():
        mark = folder / COMPLETE
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(mark.stat().st_mtime)) if mark.exists() else ""
        state = "complete" if mark.exists() else "not finished"
        try:
            if mark.exists():
                check_undamaged(folder)
        except DamagedCheckpointError:
            state = "damaged"
        table.add_row(str(int(folder.name.removeprefix("step_"))), format_bytes(_size(folder)), saved, state)
    printer().print(table)


def prune(path: str, *, keep: int = 2) -> None:
    """Delete the checkpoints of a run that were not finished, and all others but the newest ones.

    Args:
        path: folder of a run that nobody writes at the moment.
        keep: newest checkpoints that stay; damaged ones do not count.

    Raises:
        StuckCheckpointError: some cannot be deleted; all others are.
    """
    check_least(1, keep=keep)
    run = _run(path)
    with hold(run, trains=False):
        before = {folder: _size(folder) for folder in run.checkpoint_folders()}
        stuck = run.prune(keep)
    gone = [size for folder, size in before.items() if not folder.exists()]
    left = f"{len(run.checkpoints())} left"
    printer().print(f"{count(len(gone), 'checkpoint')} deleted, {format_bytes(sum(gone))}; {left}")
    if stuck:
        names = ", ".join(folder.name for folder in stuck)
        raise StuckCheckpointError(f"{count(len(stuck), 'checkpoint')} of {path} cannot be deleted: {names}.")


def _run(path: str) -> RunFolder:
    run = RunFolder(Path(path))
    if not run.checkpoint_folders():
        raise OptionError(f"path is {path}, which holds no checkpoints; give the folder of a run, such as runs/name.")
    return run


def _checkpoints(path: str) -> list[Checkpoint]:
    """Returns a run's complete checkpoints, or the one whose folder the path is."""
    folder = Path(path)
    if (folder / COMPLETE).exists():
        return [Checkpoint(0, folder)]
    found = _run(path).checkpoints()
    if not found:
        raise OptionError(f"path is {path}, of which no checkpoint was finished; give another run.")
    return found


def _has_others(looked_at: list[Checkpoint]) -> bool:
    """Whether the run has checkpoints that were not looked at and are not known to be damaged."""
    known = {each.path.resolve() for each in looked_at}
    for other in RunFolder(looked_at[0].path.resolve().parent.parent).checkpoints():
        if other.path.resolve() not in known:
            with suppress(DamagedCheckpointError):
                check_undamaged(other.path)
                return True
    return False


def _size(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in files_of(folder))
