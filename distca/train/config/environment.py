"""The environment of a launcher: variables that are given, the settings that they set, and the ones that are refused.

It needs the standard library only, because mistakes are refused before anything is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from distca.errors import LaunchError
from distca.train.config.variable import Launcher, Values, Variable
from distca.train.config.variables import VARIABLES

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def read(launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's variables that are given; an empty one is not.

    Raises:
        LaunchError: a variable that this launcher does not take, a misspelling of one, or a value that cannot be.
    """
    taken = {variable.name for variable in VARIABLES if variable.sets(launcher) is not None}
    given = {name: value for name, value in environment.items() if value}
    for name in given:
        if name not in taken:
            _refuse_unknown(name, given[name], launcher)
    for name in taken & given.keys():
        check_value(name, given[name], _BY_NAME[name].allowed(launcher))
    return {variable.name: given[variable.name] for variable in VARIABLES if variable.name in given.keys() & taken}


def near_misses(launcher: Launcher, environment: Mapping[str, str]) -> list[str]:
    """Sentences on variables that may be misspelled: one letter away from one that the launcher takes and is not given.

    :func:`read` refuses what is surely misspelled. Short names are alike by chance too, so of these a launcher warns.
    """
    given = {name: value for name, value in environment.items() if value}
    taken = [name for name, variable in _BY_NAME.items() if variable.sets(launcher) is not None]
    known = [name for name in taken if len(name) >= _FEWEST_LETTERS and name not in given]
    near = {name: [each for each in known if _one_letter(name, each)] for name in given.keys() - _BY_NAME.keys()}
    return [
        f"{name} is '{given[name]}', which no script of DistCA reads. If you mean {each[0]}, rename it."
        for name, each in sorted(near.items())
        if each
    ]


def _one_letter(name: str, known: str) -> bool:
    """Whether one letter more, less or other makes the one from the other, or two neighbours in the other order.

    A known name with few letters is not meant by a word with another letter in it (MODE, NODE).
    """
    at = next((at for at, (a, b) in enumerate(zip(name, known, strict=False)) if a != b), min(len(name), len(known)))
    a, b = name[at:], known[at:]
    other = a[1:] == b[1:] and len(known) > _FEWEST_LETTERS
    return a != b and (other or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:]))


def check_value(name: str, value: str, values: Values) -> None:
    """Refuse a value that a variable cannot have.

    Raises:
        LaunchError: it cannot.
    """
    if not re.fullmatch(values.pattern, value, re.DOTALL):
        raise LaunchError(f"{name} is '{value}'; it must be {values.words}.")


def refuse_twice(launcher: Launcher, values: Mapping[str, str], arguments: Iterable[str]) -> None:
    """Refuse what a variable and an argument both set.

    Args:
        launcher: who reads the variables.
        values: given variables, from :func:`read`.
        arguments: the user's own.

    Raises:
        LaunchError: on the first such variable.
    """
    named = settings_among(arguments)
    for name in values:
        for setting in _BY_NAME[name].sets(launcher) or ():
            option = f"--{setting.removeprefix('--')}"
            if option in named:
                raise LaunchError(
                    f"{name} and {option} are both given, and say the same thing twice.", "keep one of them."
                )


def settings_among(arguments: Iterable[str]) -> set[str]:
    """The options that a command line gives, with their dashes."""
    return {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}


def settings(launcher: Launcher, values: Mapping[str, str]) -> list[str]:
    """The dotted settings that variables set, as arguments."""
    words: list[str] = []
    for name, value in values.items():
        for setting in _BY_NAME[name].sets(launcher) or ():
            if not setting.startswith("--"):
                words += [f"--{setting}", _BY_NAME[name].written(value)]
    return words


def help_text(launcher: Launcher) -> str:
    """The launcher's variables for a terminal, one a line."""
    taken = [variable for variable in VARIABLES if variable.sets(launcher) is not None]
    width = max(len(variable.name) for variable in taken) + 2
    lines = [
        f"  {variable.name:{width}}{variable.meaning} ({variable.allowed(launcher).words}; default: {variable.default})"
        for variable in taken
    ]
    return "\n".join([f"environment variables of {launcher.value}:", *lines])


def markdown() -> str:
    """All variables as a table of docs/environment.md; where no default is named it is the configuration's."""
    lines = ["| variable | meaning | values, default | sets |", "|---" * 4 + "|"]
    for variable in VARIABLES:
        several = ", several in benchmarks" if variable.listed else ""
        default = re.sub("^; default: the configuration's", "", f"; default: {variable.default}")
        values = _short(variable.values.words) + several + default
        lines.append(f"| `{variable.name}` | {variable.meaning} | {values} | {_sets(variable)} |")
    return "\n".join(lines)


def _sets(variable: Variable) -> str:
    """Returns what a variable sets, and where it is taken if that is not everywhere."""
    training, benchmarks = (
        ", ".join(f"`{setting}`" for setting in sets or ()) for sets in (variable.training, variable.benchmarks)
    )
    if variable.benchmarks is None:
        return f"{training} (training)".lstrip()
    if variable.training is None:
        return f"{benchmarks} (benchmarks)"
    if variable.stages:
        return f"{training} (training, run4d.sh)"
    return training if not benchmarks or benchmarks == training else f"{training}; benchmarks: {benchmarks}"


def _short(words: str) -> str:
    """The values of a variable, in fewer words than in messages."""
    words = words.removeprefix("a whole number ").replace("of at least", "from").removesuffix(" to 999999999")
    return words.replace("a whole number", "from 0")


def _refuse_unknown(name: str, value: str, launcher: Launcher) -> None:
    """Refuse a variable that somebody seems to have meant for a launcher; all others are none of ours."""
    variable = _meant(name)
    if variable is None and launcher is Launcher.TRAINING and name in _NO_VARIABLES:
        raise LaunchError(
            f"There is no variable {name}.", f"{_NO_VARIABLES[name].replace('{value}', value)}, or unset {name}."
        )
    if variable is None:
        if _bare(name) == "DP":
            raise LaunchError(
                f"There is no variable {name}: all ranks that other parallelism leaves are data parallel.",
                f"unset {name}.",
            )
        if name.startswith("EXPERIMENT_"):
            ours = " and ".join(known for known in _BY_NAME if known.startswith("EXPERIMENT_"))
            raise LaunchError(f"There is no variable {name}.", f"unset it; {ours} exist in {Launcher.TRAINING.value}.")
        if name.startswith("DISTCA_"):
            raise LaunchError(f"There is no variable {name}; none of ours starts with DISTCA_.", f"unset {name}.")
        return
    if variable.sets(launcher) is not None:
        raise LaunchError(
            f"There is no variable {name}; did you mean {variable.name}?",
            f"unset {name}, or rename it to {variable.name}.",
        )
    instead = variable.instead
    if not instead:
        (setting,) = variable.training or variable.benchmarks or ()
        instead = f"append --{setting} {variable.written(value) if value in ('0', '1') else value}"
    script = launcher.value.rpartition("/")[2]
    raise LaunchError(
        f"{name} is not a variable of {script}.", f"{instead.replace('{value}', value)}, or unset {name}."
    )


# What others' scripts take and would be passed over here, and what to do instead.
_NO_VARIABLES = {
    "LR": "append --optimizer.lr {value}",
    "LEARNING_RATE": "append --optimizer.lr {value}",
    "SAVE_EVERY": "append --checkpoint.save_every {value}",
    "SAVE_INTERVAL": "append --checkpoint.save_every {value}",
}
# Words around a name that change nothing: NUM_STEPS, TP_DEGREE, CONTEXT_LEN.
_BEFORE = ("NUM", "MAX", "TRAIN", "ENABLE", "USE")
_AFTER = ("SIZE", "DEGREE", "LEN", "LENGTH")
# Short names are alike by chance (MODE, NODE), and a prefix makes a variable somebody else's (PET_MASTER_ADDR).
_LONG_ENOUGH, _CLOSE = 8, 0.85
_FEWEST_LETTERS = 4
"""The fewest letters of a variable that a launcher warns about."""


def _meant(name: str) -> Variable | None:
    """The variable that a name means: its own, another way to write it, or nearly it."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    squeezed = name.replace("_", "")
    for variable in VARIABLES:
        if squeezed in (known.replace("_", "") for known in (variable.name, *variable.also)):
            return variable
    for variable in VARIABLES:
        known = variable.name.replace("_", "")
        near = min(len(squeezed), len(known)) >= _LONG_ENOUGH and squeezed[0] == known[0]
        if _bare(name) == _bare(variable.name) or (near and SequenceMatcher(None, squeezed, known).ratio() > _CLOSE):
            return variable
    return None


def _bare(name: str) -> str:
    """A name without underscores, plural and the words around it."""
    words = name.split("_")
    if len(words) > 1 and words[0] in _BEFORE:
        words = words[1:]
    if len(words) > 1 and words[-1] in _AFTER:
        words = words[:-1]
    return re.sub("E?S?$", "", "".join(words))
