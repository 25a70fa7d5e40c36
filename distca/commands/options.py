"""Limits on the options of commands, checked before anything else is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distca.errors import OptionError, system_words
from distca.sizes.head_dims import unserved


def check_least(least: int, **options: int | None) -> None:
    """Refuse options below ``least``; those that are None were not given.

    Raises:
        OptionError: naming the first one.
    """
    for name, value in options.items():
        if value is not None and value < least:
            raise OptionError(f"--{name} is {value}; it must be at least {least}.")


def check_most(most: int, **options: int | None) -> None:
    """Refuse options above ``most``; those that are None were not given.

    Raises:
        OptionError: naming the first one.
    """
    for name, value in options.items():
        if value is not None and value > most:
            raise OptionError(f"--{name} is {value}; it must be at most {most}.")


def check_head_dim(head_dim: int) -> None:
    """Refuse a head dimension that no kernel is given.

    Raises:
        OptionError: naming it.
    """
    if why := unserved(head_dim):
        raise OptionError(f"--head_dim is {why}.")


def check_tolerance(tolerance: float) -> None:
    """Refuse a planner's tolerance that is no share.

    Raises:
        OptionError: naming it.
    """
    if not 0 <= tolerance < 1:
        raise OptionError(f"--tolerance is {tolerance}; it must be at least 0 and below 1.")


@contextmanager
def writing(option: str, path: str | Path) -> Iterator[None]:
    """Turns an error that keeps a file from being written, a full disk too, into a sentence.

    Raises:
        OptionError: naming the option, the file and what the system says.
    """
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"--{option} is {str(path) or 'empty'}, which cannot be written ({system_words(error)}); give another file."
        ) from None


def check_writable(option: str, path: str | Path) -> None:
    """Refuse a file that could not be written once the work is done; its folder is made where it is missing.

    Raises:
        OptionError: naming the option, the file and what the system says.
    """
    with writing(option, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        present = os.path.lexists(path)
        with open(path, "ab"):  # leaves what is in it
            pass
        if not present:
            os.unlink(path)


def check_picture(path: str) -> None:
    """Refuse a picture that could not be written once everything is planned.

    Raises:
        OptionError: naming the suffixes that can be drawn, or what keeps it from being written.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    suffixes = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lower().removeprefix(".") not in suffixes:
        raise OptionError(f"--picture is {path}; its name must end in one of .{', .'.join(suffixes)}.")
    check_writable("picture", path)
