"""An environment variable of a launcher: the script that reads it, the values that it may have, and what it sets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Launcher(Enum):
    """The script that reads the environment."""

    TRAINING = "pretrain_llama.sh"
    RUN_3D = "benchmarks/example-3d-parallel/run3d.sh"
    RUN_4D = "benchmarks/example-4d-parallel/run4d.sh"


@dataclass(frozen=True)
class Values:
    """The values that a variable may have: a regular expression for all of it, and words for that."""

    pattern: str
    words: str


COUNT = Values("[1-9][0-9]{0,8}", "a whole number from 1 to 999999999")
COUNT_FROM_0 = Values("0|[1-9][0-9]{0,8}", "a whole number from 0 to 999999999")
AT_LEAST_1 = Values("[1-9][0-9]*", "a whole number of at least 1")
FROM_0 = Values("0|[1-9][0-9]*", "a whole number of at least 0")
PORT = Values(
    "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]",
    "a whole number from 1 to 65535",
)
SWITCH = Values("0|1", "0 or 1")
TEXT = Values(".*", "text")


def one_of(*words: str) -> Values:
    """The values that are some words."""
    return Values("|".join(map(re.escape, words)), " or ".join([", ".join(words[:-1]), words[-1]]))


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name.
        values: what it may be.
        default: what holds where it is not given, in words.
        meaning: in one line.
        training: what it sets in training: dotted settings, and options that the launcher makes, which begin with
            dashes; empty where the launcher itself reads it; None where training does not take it.
        benchmarks: the same for run3d.sh and run4d.sh.
        stages: among the benchmarks only run4d.sh takes it.
        listed: the benchmarks take several of its values, with spaces.
        instead: what to do in a launcher that does not take it, with {value} in it; by default to append its setting.
        also: what the same is called elsewhere, and so would be tried.
    """

    name: str
    values: Values
    default: str
    meaning: str
    training: tuple[str, ...] | None = ()
    benchmarks: tuple[str, ...] | None = ()
    stages: bool = False
    listed: bool = False
    instead: str = ""
    also: tuple[str, ...] = ()

    def sets(self, launcher: Launcher) -> tuple[str, ...] | None:
        """Returns the settings that it sets in ``launcher``; None where that does not take it."""
        if launcher is Launcher.TRAINING:
            return self.training
        return None if self.stages and launcher is Launcher.RUN_3D else self.benchmarks

    def allowed(self, launcher: Launcher) -> Values:
        """Returns the values that ``launcher`` takes for it."""
        if not self.listed or launcher is Launcher.TRAINING:
            return self.values
        one, words = self.values.pattern, self.values.words
        return Values(f"({one})( ({one}))*", f"{words}, or several with spaces between")

    def written(self, value: str) -> str:
        """A value as a setting has it."""
        return {"0": "false", "1": "true"}[value] if self.values is SWITCH else value
