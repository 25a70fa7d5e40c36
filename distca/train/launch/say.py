"""How a launcher speaks: sentences on standard error, and exit codes as a shell has them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from distca.errors import LaunchError
from distca.train.config.environment import near_misses
from distca.train.config.variable import Launcher


def say(text: str, end: str = "\n") -> None:
    """Write to standard error, at once."""
    sys.stderr.write(text + end)
    sys.stderr.flush()


def warn_of_near_misses(launcher: Launcher) -> None:
    """Warns of this process's environment variables whose names are nearly those that the launcher takes."""
    for sentence in near_misses(launcher, os.environ):
        say(f"warning: {sentence}")


def report(error: str, next_step: str) -> None:
    """Says what is wrong, and what to do about it."""
    say(f"error: {error}")
    say(f"next step: {next_step}")


def leave(launch: Callable[[], int]) -> NoReturn:
    """Launch, and end this process with the exit code of it; a mistake is two lines and exit code 2."""
    # Some schedulers set these for each machine. Python on the way to the ranks would take itself for one of them, and
    # be silent where it is not the first; the ranks get their own.
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.pop(name, None)
    try:
        raise SystemExit(launch())
    except LaunchError as error:
        report(str(error), error.next_step)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
