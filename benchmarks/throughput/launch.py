"""``run3d.sh`` and ``run4d.sh``: their variables and arguments → ranks of ``benchmarks.throughput``.

    python -m benchmarks.throughput.launch 3d --cad.tolerance 0.02

It needs the standard library only.
"""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.throughput.unused import STAGES, refuse_unused
from distca.errors import LaunchError
from distca.train.config import environment
from distca.train.config.variable import Launcher
from distca.train.launch import start
from distca.train.launch.check import check_words
from distca.train.launch.installation import ROOT, find_python
from distca.train.launch.machines import find_machines
from distca.train.launch.pretrain import configuration
from distca.train.launch.say import leave, report, say, warn_of_near_misses
from distca.words import count

_TAKE_DEGREE = {"cp": "cp{}", "cp-keep": "cp{}-keep", "cp-halo": "cp{}-halo", "ring": "ring{}", "ulysses": "ulysses{}"}
_TAKE_DEGREE |= {"megatron-te-p2p": "megatron-te{}-p2p", "megatron-te-a2a": "megatron-te{}-a2a"}
_PEER = "megatron-te"
_LAUNCHERS = {"3d": Launcher.RUN_3D, "4d": Launcher.RUN_4D}


def launch(launcher: Launcher, arguments: list[str]) -> int:
    """Check everything, run the benchmark, draw the table over all runs; the exit code."""
    given = environment.read(launcher, os.environ)
    warn_of_near_misses(launcher)
    environment.refuse_twice(launcher, given, arguments)
    refuse_unused(arguments, used=() if launcher is Launcher.RUN_3D else (STAGES,))
    machines = find_machines(launcher, given, os.environ)
    values = _defaults(launcher, machines.gpus) | given
    sizes: dict[str, int] = {name: int(values[name]) for name in ("TP_SIZE", "PP_SIZE") if name in values}
    machines.check_divisible(sizes)
    starts = _options(values, machines.world_size // (sizes["TP_SIZE"] * sizes.get("PP_SIZE", 1)))
    rest = _settings(launcher, values, arguments)
    dry, python = values.get("DRY_RUN") == "1", find_python()
    if not python and not dry:
        raise LaunchError("DistCA's dependencies are missing.", "run bash pretrain_llama.sh once, which installs them.")
    os.chdir(ROOT)
    logs = Path(launcher.value).parent / "logs"
    if not python:
        say("DistCA's dependencies are missing, so the settings are not checked; bash pretrain_llama.sh installs them.")
    elif not {"-h", "--help"}.isdisjoint(arguments):
        sys.stdout.write(environment.help_text(launcher) + "\n\n")
        sys.stdout.flush()
        return subprocess.call([python, "pretrain_llama.py", "--help"])
    else:
        # Once and here, so that a mistake is one sentence and not a failure report of every rank.
        for own in starts:
            check = [*check_words(machines), "--output", str(logs), *own, "--", *rest]
            code = subprocess.call([python, "-m", "benchmarks.throughput", *check])
            if code:
                return code
    name = values.get("NAME") or time.strftime("%Y%m%d-%H%M%S")
    # Only the first machine's ranks write figures.
    folder = logs / name if machines.node else _free_folder(logs, name, make=not dry)
    path = f"PYTHONPATH={os.environ.get('PYTHONPATH', ROOT)}"
    commands = [
        start.command(
            machines,
            python or "python",
            ["-m", "benchmarks.throughput", "--output", str(folder), *own, "--", *rest],
            os.environ,
            more=[path],
        )
        for own in starts
    ]
    text = "\n".join(map(shlex.join, commands))
    if dry:
        sys.stdout.write(text + "\n")
        return 0
    ranks, nodes = count(machines.world_size, "rank"), count(machines.nodes, "node")
    say(f"Starting {ranks} on {nodes} through {machines.starter}; figures and log go to {folder}.")
    if machines.node:
        return next((status for words in commands if (status := start.Ranks(words).run().status)), 0)
    (folder / "command.txt").write_text(text)
    return _run(commands, folder, str(python))


def _run(commands: list[list[str]], folder: Path, python: str) -> int:
    for number, words in enumerate(commands, 1):
        # The progress bar needs the terminal itself; elsewhere the log is also kept in a file.
        log = None if sys.stderr.isatty() else folder / ("log.txt" if number == 1 else f"log-{number}.txt")
        run = start.Ranks(words, log).run()
        if run.stopped_by:
            next_step = "start again; every start begins anew and takes a folder of its own."
            report(f"The run was stopped by {run.stopped_by.name}.", next_step)
        if run.status:
            return run.status
    logs = str(folder.parent)
    code = subprocess.call([python, "-m", "benchmarks.throughput.sweep", logs, "--output", logs])
    if not code:
        say(f"All runs so far: {logs}/table.md and {logs}/plot.png.")
    return code


def _defaults(launcher: Launcher, gpus: int) -> dict[str, str]:
    """The benchmark's own values of its variables."""
    stages = launcher is Launcher.RUN_4D
    large = {"MODEL": "8b", "LAYERS": "4", "TOKENS_PER_RANK": "131072", "CONTEXT_LENGTH": "131072", "BATCHES": "30"}
    small = {"MODEL": "tiny", "LAYERS": "2", "TOKENS_PER_RANK": "512", "CONTEXT_LENGTH": "512", "BATCHES": "4"}
    alike = {"TP_SIZE": "1", "MIX": "pretrain prolong", "WARM_UP": "3", "RECOMPUTE": "none"}
    alike |= {"MODE": "distca packed" if stages else "all", "MICRO_BATCHES": "4" if stages else "1"}
    return (large if gpus else small) | alike | ({"PP_SIZE": "2"} if stages else {})


def _options(values: Mapping[str, str], data_ranks: int) -> list[list[str]]:
    """Options of ``benchmarks.throughput`` itself, of every start of the ranks: one for this project's modes, and one
    for each that is unmodified Megatron-Core."""
    modes, degree = values["MODE"].split(), values.get("CP_SIZE")
    if degree and data_ranks % int(degree):
        raise LaunchError(
            f"CP_SIZE is {degree}, which does not divide the {data_ranks} ranks that TP_SIZE and PP_SIZE leave."
        )
    if degree and not {"all", *_TAKE_DEGREE} & set(modes):
        raise LaunchError(
            f"CP_SIZE is {degree}, but no mode of '{values['MODE']}' takes it.",
            "unset it, or add cp, cp-keep, cp-halo, ring, ulysses, megatron-te-p2p or megatron-te-a2a to MODE.",
        )
    names = [_TAKE_DEGREE.get(mode, mode).format(degree or data_ranks) for mode in modes]
    ours = [name for name in names if not name.startswith(_PEER)]
    groups = [ours] * bool(ours) + [[name] for name in names if name.startswith(_PEER)]
    words = ["--mixes", *values["MIX"].split(), "--contexts", *values["CONTEXT_LENGTH"].split()]
    words += ["--batches", values["BATCHES"], "--warm-up", values["WARM_UP"]]
    words += ["--degree", degree] if degree and modes == ["all"] else []
    return [["--modes", *group, *words] for group in groups]


def _settings(launcher: Launcher, values: Mapping[str, str], arguments: list[str]) -> list[str]:
    """Settings of pretrain_llama.py. Relative to the project, where the ranks are started: results name no place on
    this machine."""
    words = ["--config", configuration(values["MODEL"])]
    if values["MODEL"] == "tiny":
        words += ["--model.vocabulary", "256"]
    if launcher is Launcher.RUN_3D:
        words += ["--parallel.pp", "1"]
    words += environment.settings(launcher, values)
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before == "--config" and Path(argument).is_file():  # named from where the user stands
            path = Path(argument).absolute()
            argument = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
        words.append(argument)
    return words


def _free_folder(logs: Path, name: str, make: bool) -> Path:
    """logs/NAME, or the first free one of NAME-2, NAME-3, ..., as training does. Making it fails where a run that
    started at the same moment was first."""
    for number in itertools.count(1):
        folder = logs / (name if number == 1 else f"{name}-{number}")
        if folder.exists():
            continue
        try:
            if make:
                folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise LaunchError(
                f"The folder {ROOT / folder} cannot be made ({error.strerror}).",
                f"look at who may write to {ROOT / logs}.",
            ) from None
    raise AssertionError("there is always a next number")


if __name__ == "__main__":
    leave(lambda: launch(_LAUNCHERS[sys.argv[1]], sys.argv[2:]))
