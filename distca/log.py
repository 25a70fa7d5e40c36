"""Sets up logging, and ends a process with a sentence on a user's mistake and exit code 2.

Rank 0 logs from INFO on, other ranks from WARNING on. So a line that all ranks would log appears once.
"""

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

_FILE_WIDTH = 120
"""Columns of lines on standard error where that is no terminal, and so has no width."""
SILENCE_S = 10.0
"""Seconds that other ranks wait before they say a user's mistake. Rank 0, which usually finds the same one, says it at
once, and its launcher ends the others meanwhile."""

MISTAKE = 2
"""The exit code after a user's mistake was said in a sentence."""


@cache
def console() -> Console:
    """Returns this process's only console on standard error, which log lines and the progress bar share.

    Brackets in a text are shown, and are no markup of rich."""
    width = None if sys.stderr.isatty() else _FILE_WIDTH
    return Console(stderr=True, width=width, markup=False)


def printer() -> Console:
    """Returns a console on standard output, for the results of a command; it has no markup either."""
    return Console(markup=False, highlight=False)


def print_json(found: object) -> None:
    """Prints a command's results on standard output as one JSON value, for other programs."""
    printer().print(json.dumps(found, indent=1, ensure_ascii=False), soft_wrap=True)


def setup_logging(rank: int, name: str = "") -> None:
    """Sends this process's log to standard error: rank 0 from INFO on, other ranks from WARNING on with their rank.

    A second call replaces the first. So a process may log as rank 0 until it knows its rank.

    Args:
        rank: this process's rank.
        name: the name before each line of a rank other than 0; empty for "rank N".
    """
    root = logging.getLogger()
    for earlier in list(root.handlers):
        if not isinstance(earlier, MemoryHandler):  # that of early_lines stays
            root.removeHandler(earlier)
    message = "%(message)s" if rank == 0 else f"[{name or f'rank {rank}'}] %(message)s"
    handler: logging.Handler
    if console().is_terminal:
        handler = RichHandler(console=console(), show_path=False, omit_repeated_times=False, log_time_format="%X")
        handler.setFormatter(logging.Formatter(message))
    else:
        handler = logging.StreamHandler()  # in files and in Slurm's output a message is one line
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {message}", "%H:%M:%S"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root.addHandler(handler)
    # Other libraries log from WARNING on. Ours log from INFO on, on all ranks: each rank's log file has these lines.
    root.setLevel(logging.WARNING)
    for name in ("distca", "megatron_patches"):
        logging.getLogger(name).setLevel(logging.INFO)
    # When Megatron-Core imports this module, it warns on every CPU rank that there is nvcc without a GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


@contextmanager
def early_lines() -> Iterator[None]:
    """Collects lines that are logged in the ``with`` block before there is a log file.

    :func:`hand_over_early_lines` writes them once there is one."""
    kept = MemoryHandler(0, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    logging.getLogger().addHandler(kept)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(kept)
        kept.close()


def hand_over_early_lines(file: logging.Handler) -> None:
    """Writes the lines that :func:`early_lines` has collected to a log file's handler; no more are collected."""
    root = logging.getLogger()
    for kept in [each for each in root.handlers if isinstance(each, MemoryHandler)]:
        root.removeHandler(kept)
        kept.setTarget(file)
        kept.flush()


def die(error: BaseException | str, next_step: str | None = None, everywhere: bool = False) -> NoReturn:
    """Says a user's mistake and what to do about it, and ends this process with exit code :data:`MISTAKE`.

    Usually all ranks find the same mistake. So only rank 0 and the first rank of each machine say it at once. The other
    ranks say it after :data:`SILENCE_S`, if nothing has ended them by then.

    Args:
        error: the user's mistake, as a sentence.
        next_step: what to do about it; None takes the error's attribute ``next_step``, or a general hint.
        everywhere: True says it at once on any rank, as other ranks did not find it.
    """
    # The first rank of a machine also speaks at once, as that machine's disk or packages may be wrong.
    if not everywhere and "0" not in (os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK")):
        # A launcher ends all ranks as soon as one ends. So a rank that stays silent must not end first.
        time.sleep(SILENCE_S)
    say_mistake(str(error), next_step or getattr(error, "next_step", None) or "correct what is named and start again.")
    raise SystemExit(MISTAKE)


def say_mistake(sentence: str, next_step: str) -> None:
    """Prints a mistake, and what to do about it, on standard error."""
    console().print(Text.assemble(("error: ", "bold red"), (sentence, "red")), soft_wrap=True)
    console().print(Text.assemble(("next step: ", "bold"), next_step), soft_wrap=True)
