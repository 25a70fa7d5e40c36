"""Every command in the documentation works: fenced bash blocks of all pages, line by line, in a copy of the project.

A line is run as it stands, or in a cheaper way by the first rule of RULES that matches it; a line that no rule covers
fails. That run alone forks ranks which is made before others go on from it; everywhere else settings are only checked
(DRY_RUN=1), or options looked for in --help. Bash runs each launcher once; from then on it runs in a forked process.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import dropwhile
from pathlib import Path

import pytest

from benchmarks.family_models import write_folder
from distca.train.launch.installation import CPU_TORCH
from tests.docs.pages import PAGES, ROOT, blocks, name_of, without_comment
from tests.testing import programs

ASSIGNMENTS = r"(?:[A-Z][A-Z_0-9]*=(?:\"[^\"]*\"|\S+) )*"
ALLOCATION = "--nodes=2 --gpus-per-node=8 --ntasks-per-node=8"
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
CONVERT = "distca data convert --source jsonl --path corpus.jsonl --tokenizer tokenizer.json"
CONVERT += ' --end_token "</s>" --output corpus'  # as docs/data.md has it
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2, "?": 3}, "unk_token": "?"},
    "pre_tokenizer": {"type": "Whitespace"},
}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
FILES = {
    "corpus.jsonl": json.dumps({"text": "a b a " * 50}) + '\n{"text": "b a b a"}\n' * 299,
    "tokenizer.json": json.dumps(TOKENIZER),
    "my/texts/one.txt": "a text",
    "talks.jsonl": f"{json.dumps(TALK)}\n" * 9,
    "costs.json": (ROOT / "distca/plan/cost/tables/h200_flash4_32x8x128.json").read_text(),
    "path/to/folder/tokenizer.json": json.dumps(TOKENIZER),
    "path/to/folder/chat_template.jinja": TEMPLATE,
}
PYTHON = f"exec {shlex.quote(sys.executable)}"
# Every machine is one without GPUs, where the ranks of a Slurm job can be asked for.
PROGRAMS = {"nvidia-smi": "exit 1", "scontrol": "echo node-1; echo node-2", "python": f'{PYTHON} "$@"'}


LAUNCHERS = {
    "pretrain_llama.sh": ["distca.train.launch.pretrain"],
    "benchmarks/example-3d-parallel/run3d.sh": ["benchmarks.throughput.launch", "3d"],
    "benchmarks/example-4d-parallel/run4d.sh": ["benchmarks.throughput.launch", "4d"],
}
"""What each script starts."""
# A launcher, whose check of the settings is forked too, with no other variables than those of its first word.
LAUNCH = """
import json, os, runpy, subprocess, sys
from tests.testing import programs

os.environ.clear()
os.environ.update(json.loads(sys.argv.pop(1)))
subprocess.call = lambda words: programs.Program(words).wait()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class Project:
    """A copy of the project with all files that commands name, beside a cluster's programs; code is only linked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.help = folder / "distca", folder / "bin", dict[str, str]()
        self.launched = set[str]()
        shutil.copytree(ROOT / "docs", self.folder / "docs")
        for path in ROOT.iterdir():
            if path.name not in ("docs", ".git", ".venv", "runs"):
                (self.folder / path.name).symlink_to(path)
        write_folder("llama", self.folder / "path/to/folder")
        (self.folder / "path/to/Llama-3.1-8B").symlink_to("folder")
        for place, text in FILES.items():
            (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / place).write_text(text)
        self.bin.mkdir()
        for name, text in PROGRAMS.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.bin / name).chmod(0o755)

    def run(self, command: str, **variables: str) -> str:
        """Run a line of bash; its output. It may not fail."""
        words = ["bash", "-c", command]
        kept = self._environment(variables)
        ran = subprocess.run(words, cwd=self.folder, env=kept, text=True, capture_output=True, timeout=240)
        assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
        return ran.stdout

    def launch(self, command: str, **variables: str) -> str:
        """The same of a line that is one of LAUNCHERS with variables before it and arguments behind it."""
        words = shlex.split(command)
        place = words.index("bash")
        script, arguments = words[place + 1], words[place + 2 :]
        if script not in self.launched or not {"$", "`", "*"}.isdisjoint(command):
            self.launched.add(script)
            return self.run(command, **variables)
        given = dict(word.split("=", 1) for word in words[:place])
        module, *more = LAUNCHERS[script]
        return self.fork(
            "python", "-c", LAUNCH, json.dumps(self._environment(variables | given)), module, *more, *arguments
        )

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR")}
        kept |= {"PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(self.folder)}
        return kept | {"OMP_NUM_THREADS": "1"} | variables

    def fork(self, *words: str) -> str:
        """The same of a Python program, from a process that has imported what it needs."""
        words = ("-m", "distca.commands.main", *words[1:]) if words[0] == "distca" else words[1:]
        ran = programs.run(*words, cwd=self.folder, timeout=240, PYTHONPATH=str(self.folder), COLUMNS="120")
        assert ran.returncode == 0, f"{words}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
        return ran.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(tmp_path_factory.mktemp("documentation"))
    as_it_stands(made, CONVERT)
    return made


def as_it_stands(project: Project, command: str) -> None:
    project.fork(*shlex.split(command))


def parsed(project: Project, command: str) -> None:
    """A line of bash, perhaps with <a placeholder> in it."""
    project.run(f"bash -n <<'end'\n{re.sub('<[^>]*>', 'placeholder', command)}\nend")


def pip_install(project: Project, command: str) -> None:
    """What it names is what pyproject.toml has, or the build of torch that the launcher installs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.fullmatch(r'pip install (?:-e )?"?(\.(?:\[(?P<extras>.*)\])?|.*?)"?', command)
    assert named and (named[1][0] == "." or named[1] in [CPU_TORCH, *(each for all in extras.values() for each in all)])
    assert set((named["extras"] or "dev").split(",")) <= set(extras)


def first_run(project: Project, command: str) -> None:
    """What the launcher would start is started here, with forked ranks.

    In the matrix, tests/train/test_servers.py has real ones."""
    if not (project.folder / "runs").exists():
        said = checked(project, f"{command} --train.validate_batches 1", STEPS="2")
        project.fork(*dropwhile(lambda word: "=" in word, shlex.split(said)[1:]))  # behind env and its variables
        written = {path.name for path in (project.folder / "runs" / "llama-tiny").iterdir()}
        assert {"config.yaml", "metrics.jsonl", "balance.png", "tensorboard", "checkpoints"} <= written


def checked(project: Project, command: str, **variables: str) -> str:
    """Settings are checked; the command that would start the ranks. Options of sbatch are Slurm's."""
    if command.startswith("bash pretrain_llama.sh") or "RESUME=" in command:
        variables = {"CONTEXT_LENGTH": "256", "TOKENS_PER_RANK": "128"} | variables
    if "CONTEXT_LENGTH=131072" in command:
        variables["TOKENS_PER_RANK"] = "131072"
    variables |= JOB if command.startswith("sbatch") else {}
    said = project.launch(command.replace(f"sbatch {ALLOCATION}", "bash"), DRY_RUN="1", **variables)
    assert "pretrain_llama.py --" in said or "benchmarks" in said
    return said


def options_known(project: Project, command: str) -> None:
    """--help lists every option that the program is given; what starts it, and what it names, are left out."""
    words = shlex.split(re.sub(f"^{ASSIGNMENTS}", "", command))
    if words[0] == "torchrun":
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        assert {word.partition("=")[0] for word in words[1:script]} <= {"--standalone", "--nproc-per-node", "4"}
        words[:script] = ["python"]
    place = 3 if words[1] == "-m" or words[:2] == ["distca", "checkpoint"] else 2
    program = shlex.join([*words[:place], "--help"])
    if program not in project.help:
        project.help[program] = project.fork(*words[:place], "--help")
    options = [word.partition("=")[0] for word in words[place:] if word.startswith("--")]
    assert [option for option in options if not re.search(rf"{option}\b", project.help[program])] == []


RULES = {
    r"git clone .*|python3\.12 -m venv \.venv|source \.venv/bin/activate|pre-commit install|\.ci/run": parsed,
    rf"salloc {ALLOCATION}": parsed,
    r"pip install .*": pip_install,
    r"bash tests/run\.sh": lambda project, command: project.run(f"{command} --version"),
    r"bash pretrain_llama\.sh": first_run,
    rf"{ASSIGNMENTS}bash (pretrain_llama|benchmarks/example-[34]d-parallel/run[34]d)\.sh.*": checked,
    rf"sbatch {ALLOCATION} .*": checked,
    rf"{ASSIGNMENTS}torchrun .*|python (benchmarks/\w+\.py|-m benchmarks\.\w+).*": options_known,
    r"distca (checkpoint|profile|parity|simulate) .*": options_known,
    re.escape(CONVERT): lambda project, command: None,  # the copy of the project begins with it
    r"distca (doctor|plan|data) ?.*": as_it_stands,
}
COMMANDS = {
    page: [[(number, without_comment(line)) for number, line in block] for block in blocks(page, "bash")]
    for page in PAGES
}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS[page]], ids=name_of)
def test_commands_work(project: Project, page: Path) -> None:
    for block in COMMANDS[page]:
        allocation = ""
        for number, command in (each for each in block if each[1]):
            where = f"{name_of(page)}, line {number}: {command}"
            rule = next((rule for pattern, rule in RULES.items() if re.fullmatch(pattern, command)), None)
            assert rule is not None and command[-1] != "\\", f"no rule covers {where}; a command takes one line"
            rule(project, command.replace("bash", allocation, 1) if allocation else command)
            allocation = command.replace("salloc", "sbatch") if command.startswith("salloc") else allocation
    found = {command for each in COMMANDS.values() for block in each for _, command in block}
    assert {"bash pretrain_llama.sh", "bash tests/run.sh", "distca doctor"} <= found and len(found) > 60


def test_commands_that_fail_are_found(project: Project) -> None:
    for rule, command in (
        (checked, "TP=2 bash pretrain_llama.sh"),
        (checked, "bash pretrain_llama.sh --train.step 3"),
        (options_known, "python benchmarks/planner.py --outputs FILE"),
        (pip_install, 'pip install -e ".[gpus]"'),
    ):
        with pytest.raises(AssertionError):
            rule(project, command)
    for command in ("bash pretrain_lama.sh", "TP=2 rm -r runs"):
        assert not any(re.fullmatch(pattern, command) for pattern in RULES)
