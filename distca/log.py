"""Logging: rank 0 speaks, the others only warn; a user's mistake is one sentence and exit code 2."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from logging.handlers import MemoryHandler
from typing import NoReturn

from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

# Where standard error is not a terminal nothing says how wide it is.
_FILE_WIDTH = 120
SILENCE_S = 10.0
"""Seconds in which a rank with a mistake leaves the word to rank 0."""

MISTAKE = 2
"""Exit code of a process that has said what is wrong."""


@cache
def console() -> Console:
    """The one console of this process, on standard error, shared by log lines and the progress bar. Text is shown as it
    is: brackets in a path are no markup."""
    width = None if sys.stderr.isatty() else _FILE_WIDTH
    return Console(stderr=True, width=width, markup=False)


def printer() -> Console:
    """A console on standard output, for what a command found; text is shown as it is, too."""
    return Console(markup=False, highlight=False)


def print_json(found: object) -> None:
    """Print what a command found as one JSON value, for programs that go on with it."""
    printer().print(json.dumps(found, indent=1, ensure_ascii=False), soft_wrap=True)


def setup_logging(rank: int, name: str = "") -> None:
    """Send this process's log to standard error: rank 0 from INFO on, the others from WARNING on with their rank, or
    with another ``name``.

    Calling it again replaces the earlier setting, so that a process may start as rank 0 and learn its rank later.
    """
    root = logging.getLogger()
    for earlier in list(root.handlers):
        if not isinstance(earlier, MemoryHandler):  # it keeps lines for a file
            root.removeHandler(earlier)
    message = "%(message)s" if rank == 0 else f"[{name or f'rank {rank}'}] %(message)s"
    handler: logging.Handler
    if console().is_terminal:
        handler = RichHandler(console=console(), show_path=False, omit_repeated_times=False, log_time_format="%X")
        handler.setFormatter(logging.Formatter(message))
    else:
        handler = logging.StreamHandler()  # files and Slurm: one line each, never wrapped
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {message}", "%H:%M:%S"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root.addHandler(handler)
    # Other libraries' chatter stays out of the way; ours starts at INFO, on the other ranks for their files.
    root.setLevel(logging.WARNING)
    for name in ("distca", "megatron_patches"):
        logging.getLogger(name).setLevel(logging.INFO)
    # It warns of an nvcc without a GPU when Megatron-Core imports it, on every CPU rank.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


@contextmanager
def early_lines() -> Iterator[None]:
    """Keep what is logged inside until :func:`hand_over_early_lines` has a place for it."""
    kept = MemoryHandler(0, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    logging.getLogger().addHandler(kept)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(kept)
        kept.close()


def hand_over_early_lines(file: logging.Handler) -> None:
    """Give a handler what was kept for it, and keep no more."""
    root = logging.getLogger()
    for kept in [each for each in root.handlers if isinstance(each, MemoryHandler)]:
        root.removeHandler(kept)
        kept.setTarget(file)
        kept.flush()


def die(error: BaseException | str, next_step: str | None = None, everywhere: bool = False) -> NoReturn:
    """End this process with :data:`MISTAKE` after saying what is wrong and what to do about it: on rank 0 and once per
    machine at once, on other ranks if nothing has ended them by then.

    Args:
        error: the user's mistake, as a sentence.
        next_step: what to do about it; without one the error's ``next_step`` attribute or a general hint is shown.
        everywhere: say it on any rank at once: other ranks did not find the same.
    """
    # Also the first rank of every other machine: its disk or packages may be what is wrong.
    if not everywhere and "0" not in (os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK")):
        # A launcher ends all ranks with the first, which must not be one that said nothing. Who is left then speaks.
        time.sleep(SILENCE_S)
    say_mistake(str(error), next_step or getattr(error, "next_step", None) or "correct what is named and start again.")
    raise SystemExit(MISTAKE)


def say_mistake(sentence: str, next_step: str) -> None:
    """Prints a mistake, and what to do about it, on standard error."""
    console().print(Text.assemble(("error: ", "bold red"), (sentence, "red")), soft_wrap=True)
    console().print(Text.assemble(("next step: ", "bold"), next_step), soft_wrap=True)
