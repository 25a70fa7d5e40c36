"""``--check``: the words by which a launcher has settings checked, for the ranks that it is about to start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from distca.errors import ConfigError
from distca.train.config.variable import COUNT
from distca.train.launch.machines import Machines

_CHECK, _CPU = "--check", "cpu"


class Check(NamedTuple):
    """The check that is asked for, and its ranks and settings.

    Attributes:
        world_size: ranks.
        on_cpus: they run on CPUs. Otherwise nothing is known of their devices: the machine that checks may be a login
            node, whose own are not those of the ranks.
        settings: the rest of the command line.
    """

    world_size: int
    on_cpus: bool
    settings: list[str]


def check_words(machines: Machines) -> list[str]:
    """Returns the words before the settings: ``--check WORLD_SIZE``, and ``cpu`` behind it for CPU ranks."""
    return [_CHECK, str(machines.world_size), *([] if machines.gpus else [_CPU])]


def read_check(arguments: Sequence[str]) -> Check | None:
    """The check that a command line begins with; None where it asks for none.

    Raises:
        ConfigError: it does not say for how many ranks.
    """
    if list(arguments[:1]) != [_CHECK]:
        return None
    ranks = "".join(arguments[1:2])
    if not re.fullmatch(COUNT.pattern, ranks):
        raise ConfigError(f"{_CHECK} is followed by {ranks!r}; it needs the number of ranks, {COUNT.words}.")
    on_cpus = list(arguments[2:3]) == [_CPU]
    return Check(int(ranks), on_cpus, list(arguments[3 if on_cpus else 2 :]))
