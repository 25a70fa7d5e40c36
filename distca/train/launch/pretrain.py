"""``pretrain_llama.sh``: its variables and arguments → ranks of pretrain_llama.py."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from distca.errors import LaunchError
from distca.train.config import environment
from distca.train.config.variable import Launcher
from distca.train.launch import start
from distca.train.launch.check import check_words
from distca.train.launch.installation import ROOT, find_python, install
from distca.train.launch.machines import Machines, find_machines
from distca.train.launch.say import leave, report, say, warn_of_near_misses
from distca.words import count

_WITH_PACKAGES = ("parquet", "arrow", "blend")
"""Values of DATA_SOURCE, or data.source, whose files need packages."""
_IN_FILES = """
import sys
from distca.train.config.cli import value_in_files
sys.stdout.write(str(value_in_files(sys.argv[1], sys.argv[2:]) or ""))
"""
"""Writes a setting from the files that a command line names to stdout. This launcher's own Python may have no YAML."""


def launch(arguments: list[str]) -> int:
    """Check everything, install what is missing, train; the exit code."""
    values = environment.read(Launcher.TRAINING, os.environ)
    warn_of_near_misses(Launcher.TRAINING)
    machines = find_machines(Launcher.TRAINING, values, os.environ)
    machines.check_divisible({name: int(values.get(name, 1)) for name in ("TP_SIZE", "PP_SIZE")})
    environment.refuse_twice(Launcher.TRAINING, values, arguments)
    _refuse_contradiction(values)
    options = [*_configuration(values, machines.gpus, arguments), *environment.settings(Launcher.TRAINING, values)]
    profiler = _profiler(values, machines)
    dry, script = values.get("DRY_RUN") == "1", str(ROOT / "pretrain_llama.py")
    python = _python(values, machines, arguments, dry)
    options += _of_requeued([*options, *arguments], python)
    if python and not {"-h", "--help"}.isdisjoint(arguments):
        sys.stdout.write(environment.help_text(Launcher.TRAINING) + "\n\n")
        sys.stdout.flush()
        return subprocess.call([python, script, "--help"])
    if python:
        # Once and here, so that a mistake is one sentence and not a failure report of every rank.
        code = subprocess.call([python, script, *check_words(machines), *options, *arguments])
        if code:
            return code
    program = [script, *options, *arguments]
    words = start.command(machines, python or "python", program, os.environ, profiler=profiler)
    servers = start.servers_command(machines, python or "python", os.environ) if machines.serves else []
    if machines.node >= machines.home_nodes:
        words, servers = servers, []
    if dry:
        sys.stdout.write("".join(shlex.join(each) + "\n" for each in (words, servers) if each))
        return 0
    if profiler:
        Path("runs/nsys").mkdir(parents=True, exist_ok=True)
    return _run(words, servers, values, machines)


def _refuse_contradiction(values: Mapping[str, str]) -> None:
    if values.get("CAD") == "0" and "PING_PONG" in values:
        raise LaunchError(
            f"PING_PONG is {values['PING_PONG']}, but CAD is 0, and attention that stays at home has no transfers.",
            "unset one of them.",
        )


def _python(values: Mapping[str, str], machines: Machines, arguments: list[str], dry: bool) -> str | None:
    """A Python with all that the run needs, which is installed where it is missing; None in a dry run without."""
    extra = extras(values, arguments)
    python = find_python(extra)
    if python or not dry:
        return python or install(machines.gpus > 0, extra)
    venv = ROOT / ".venv"
    say(f"DistCA's dependencies are missing; a run would install them into {venv} first, and check the settings.")
    return None


def extras(values: Mapping[str, str], arguments: list[str]) -> str:
    """Extras of pyproject.toml that a run needs as its variables and arguments name them, divided by commas."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    given = dict(pairwise(words))
    needs = {
        "models": "INIT_FROM" in values
        or not given.keys().isdisjoint(("--checkpoint.init_from", "--checkpoint.export")),
        "data": values.get("DATA_SOURCE", given.get("--data.source")) in _WITH_PACKAGES
        or given.get("--data.tokenizer", "bytes") != "bytes",
    }
    return ",".join(name for name, needed in needs.items() if needed)


def _of_requeued(arguments: list[str], python: str | None) -> list[str]:
    """Arguments with which a Slurm job that was requeued goes on with what it saved; none where the user says how."""
    options = environment.settings_among(arguments)
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" or "--checkpoint.resume" in options:
        return []
    if python:
        asked = [python, "-P", "-c", _IN_FILES, "checkpoint.resume", *arguments]
        in_files = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        if in_files:
            say(f"Slurm starts this job again, which resumes as its configuration says: checkpoint.resume {in_files}.")
            return []
    resume = "auto" if "--name" in options else "job"
    say(f"Slurm starts this job again, which goes on with what it saved: checkpoint.resume {resume}.")
    return ["--checkpoint.resume", resume]


def _requeue(job: str) -> None:
    """Let Slurm start this job again; at preemption, and when a node fails, it does so itself."""
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    say(f"Slurm starts job {job} again." if not done.returncode else f"Slurm did not requeue job {job}: {done.stderr}")


def _configuration(values: Mapping[str, str], gpus: int, arguments: list[str]) -> list[str]:
    if {"MODEL", "CONFIG"} <= values.keys():
        raise LaunchError("MODEL and CONFIG are both set, and each names a configuration.", "keep one of them.")
    given = environment.settings_among(arguments)
    folder = "INIT_FROM" in values or "--checkpoint.init_from" in given
    if folder and "MODEL" in values:
        other = "INIT_FROM" if "INIT_FROM" in values else "--checkpoint.init_from"
        raise LaunchError(f"MODEL and {other} are both given, and each says what the model's shape is.", "keep one.")
    if "--config" in given:
        return []
    model = values.get("MODEL") or ("8b-cut" if gpus else "tiny")
    default = (
        ("configs/from-folder.yaml" if gpus else "configs/from-folder-tiny.yaml") if folder else configuration(model)
    )
    path = values.get("CONFIG") or str(ROOT / default)
    if not Path(path).is_file():
        raise LaunchError(f"There is no configuration file {path}.", f"look into {ROOT / 'configs'}.")
    return ["--config", path]


def configuration(model: str) -> str:
    """The configuration of a MODEL, from the project's folder."""
    return "configs/tiny.yaml" if model == "tiny" else f"configs/llama-{model}.yaml"


def _profiler(values: Mapping[str, str], machines: Machines) -> list[str]:
    if values.get("ENABLE_NSYS") != "1":
        return []
    if not shutil.which("nsys"):
        raise LaunchError("ENABLE_NSYS is 1, but nsys is not on PATH.", "install Nsight Systems, or unset ENABLE_NSYS.")
    part = "rank%q{SLURM_PROCID}" if machines.starter == "srun" else f"node{machines.node}"
    report_file = f"runs/nsys/{values.get('NAME', 'distca')}-{part}"
    return ["nsys", "profile", "--trace=cuda,nvtx,osrt", "--force-overwrite=true", f"--output={report_file}"]


def _run(words: list[str], servers: list[str], values: Mapping[str, str], machines: Machines) -> int:
    ranks = count(machines.world_size, f"{'GPU' if machines.gpus else 'CPU'} rank")
    if machines.servers:
        ranks += f" and {count(machines.servers, 'server')} without a model"
    given = " ".join(f"{name}={value}" for name, value in values.items())
    said = f"Starting {ranks} on {count(machines.nodes, 'node')} through {machines.starter}."
    say(f"{said} From the environment: {given}." if given else said)
    with tempfile.TemporaryDirectory() as folder:
        finished = Path(folder) / "finished"
        os.environ[start.FINISHED] = str(finished)
        run = start.Ranks(words, servers=servers).run()
        is_over = finished.exists()
    if run.asked_to_save and not run.status and not is_over and os.environ.get("SLURM_JOB_ID"):
        _requeue(os.environ["SLURM_JOB_ID"])
    # The starter's report of a failure is long, and what to do about it should come last.
    if run.status not in (0, 2):
        report(
            f"The run was stopped by {run.stopped_by.name}."
            if run.stopped_by
            else f"The run ended early, with exit code {run.status}; the log above names the rank and the step.",
            "RESUME=auto goes on from the last checkpoint (checkpoint.save_every), or starts anew if none was saved.",
        )
    return run.status


if __name__ == "__main__":
    start.hear_early()
    leave(lambda: launch(sys.argv[1:]))
