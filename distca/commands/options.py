"""What options of commands can be, checked before anything else is done."""

from __future__ import annotations


class OptionError(ValueError):
    """An option that no command can work with; the message names it, its value and the limit."""

    next_step = "change the option that is named and start again."


def check_least(least: int, **options: int | None) -> None:
    """Refuse options below ``least``; those that are None were not given.

    Raises:
        OptionError: naming the first one.
    """
    for name, value in options.items():
        if value is not None and value < least:
            raise OptionError(f"--{name} is {value}; it must be at least {least}.")
