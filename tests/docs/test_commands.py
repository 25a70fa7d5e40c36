"""Every command in the documentation works: fenced bash blocks of all pages, line by line, in a copy of the project.

A line is run as it stands, or in a cheaper way by the first rule of RULES that matches it; a line that no rule covers
fails. Ranks are forked once, for the README's first command; everywhere else settings are only checked (DRY_RUN=1).
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.family_models import write_folder
from distca.commands.main import main as distca_command
from distca.train.launch.installation import CPU_TORCH
from tests.docs.pages import PAGES, ROOT, blocks, name_of, without_comment
from tests.testing import programs

ASSIGNMENTS = r"(?:[A-Z][A-Z_0-9]*=(?:\"[^\"]*\"|\S+) )*"
# Of the one run that is really made, and of the one that goes on from it.
SMALL = {"CONTEXT_LENGTH": "256", "TOKENS_PER_RANK": "128"}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2, "?": 3}, "unk_token": "?"},
    "pre_tokenizer": {"type": "Whitespace"},
}


@dataclass
class Project:
    """A copy of the project in which commands run, beside programs that stand in for a cluster's.

    Attributes:
        folder: of the copy; code is linked, what commands write into is copied.
        variables: of the environment, for the commands of one block; salloc adds to them.
        done: commands that ran already, on any page.
        help: what programs said to --help.
    """

    folder: Path
    bin: Path
    variables: dict[str, str] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    help: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def copied(folder: Path) -> Project:
        project = Project(folder / "distca", folder / "bin")
        shutil.copytree(ROOT / "docs", project.folder / "docs")
        for path in ROOT.iterdir():
            if path.name not in ("docs", ".git", ".venv", "runs"):
                (project.folder / path.name).symlink_to(path)
        (project.folder / "corpus.jsonl").write_text('{"text": "a b a"}\n' * 200 + '{"text": "b a b a"}\n' * 99)
        (project.folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (project.folder / "my" / "texts").mkdir(parents=True)
        (project.folder / "my" / "texts" / "one.txt").write_text("a text")
        project.bin.mkdir()
        project.stand_in("nvidia-smi", "exit 1")  # on every machine the commands of one without GPUs
        project.stand_in("scontrol", "echo node-1; echo node-2")
        project.stand_in("python", f'exec {shlex.quote(sys.executable)} "$@"')
        project.stand_in("distca", f'exec {shlex.quote(sys.executable)} -m distca.commands.main "$@"')
        return project

    def stand_in(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def run(self, command: str, **variables: str) -> str:
        """Run a line of bash; its output. It may not fail."""
        kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR")}
        own = {"PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(self.folder), "COLUMNS": "120"}
        environment = kept | own | {"OMP_NUM_THREADS": "1"} | self.variables | variables
        ran = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=environment, text=True, capture_output=True, timeout=240
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
        return ran.stdout

    def fork(self, *words: str) -> None:
        """Run a Python program. It may not fail."""
        variables = {"PYTHONPATH": str(self.folder), "COLUMNS": "120"} | self.variables
        ran = programs.run(*words, cwd=self.folder, timeout=240, **variables)
        assert ran.returncode == 0, f"{words}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"


def as_it_stands(project: Project, command: str) -> None:
    """What Python runs is forked from a process that has imported what it needs."""
    first, *words = shlex.split(command)
    if first == "distca":
        project.fork("-m", "distca.commands.main", *words)
    elif first == "python":
        project.fork(*words)
    else:
        project.run(command)


def parsed(project: Project, command: str) -> None:
    project.run(f"bash -n <<'end'\n{command}\nend")


def shown(project: Project, command: str) -> None:
    """With <a placeholder> in it."""
    parsed(project, re.sub("<[^>]*>", "placeholder", command))


def pip_install(project: Project, command: str) -> None:
    """What it names is what pyproject.toml has, or the build of torch that the launcher installs."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = metadata["optional-dependencies"]
    (wanted,) = [word for word in shlex.split(command)[2:] if word != "-e"]
    named = re.fullmatch(r"\.(?:\[(.*)\])?", wanted)
    if named:
        assert set((named[1] or "dev").split(",")) <= set(extras)
    else:
        assert wanted in [CPU_TORCH, *(package for packages in extras.values() for package in packages)]


def first_run(project: Project, command: str) -> None:
    """What the launcher would start is started here, with forked ranks: tests/train/test_servers.py has real ones."""
    said = project.run(f"{command} --train.validate_batches 1", DRY_RUN="1", STEPS="2", **SMALL)
    env, *words = shlex.split(said)
    starts = words.index(next(word for word in words if "=" not in word))  # behind the variables of its ranks
    assert env == "env" and Path(words[starts]).name.startswith("python")
    project.fork(*words[starts + 1 :])
    written = {path.name for path in (project.folder / "runs" / "llama-tiny").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "balance.png", "tensorboard", "checkpoints"} <= written


def checked(project: Project, command: str, **variables: str) -> None:
    """Settings are checked, and the command that would start the ranks is printed."""
    assert "pretrain_llama.py --" in (said := project.run(command, DRY_RUN="1", **variables)) or "benchmarks" in said


def go_on(project: Project, command: str) -> None:
    """Needs the first run's checkpoint."""
    if not (project.folder / "runs").exists():
        first_run(project, "bash pretrain_llama.sh")
    checked(project, command, **SMALL)


def from_folder(project: Project, command: str) -> None:
    """Begins with a tiny model that lies where the command says."""
    write_model(project, *re.findall(r"INIT_FROM=(\S+)", command))
    if "indexed" in command and not (project.folder / "corpus.idx").exists():
        convert = "distca data convert --source jsonl --path corpus.jsonl --tokenizer tokenizer.json"
        convert += ' --end_token "</s>" --output corpus'  # as docs/data.md has it
        as_it_stands(project, convert)
        project.done.add(convert)
    long = {} if "CONTEXT_LENGTH" not in command else {"TOKENS_PER_RANK": "131072"}
    checked(project, command, GPUS_PER_NODE="0", **long)


def conversations(project: Project, command: str) -> None:
    """Goes through the chat template of a model's folder."""
    write_model(project, *re.findall(r"--tokenizer (\S+)", command))
    as_it_stands(project, command)


def write_model(project: Project, named: str) -> None:
    """A tiny model's folder with a chat template, and conversations for it."""
    if not (project.folder / named).exists():
        write_folder("llama", project.folder / named)
        (project.folder / named / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        template = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
        (project.folder / named / "chat_template.jinja").write_text(template)
        talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        (project.folder / "talks.jsonl").write_text(f"{json.dumps(talk)}\n" * 9)


def checkpoint_command(project: Project, command: str) -> None:
    """Options are known; what it names is not there."""
    words = shlex.split(command)
    options_known(project, shlex.join([*words[:3], *(word for word in words[3:] if word.startswith("--"))]))


def submitted(project: Project, command: str) -> None:
    """sbatch's own options are Slurm's; the script runs as in such a job."""
    words = shlex.split(command)
    script = next(place for place, word in enumerate(words) if word.endswith(".sh"))
    before = dict(project.variables)
    allocated(project, shlex.join(words[:script]))
    checked(project, shlex.join(["bash", *words[script:]]))
    project.variables = before


def allocated(project: Project, command: str) -> None:
    """What follows runs in a job of so many nodes and GPUs."""
    options = dict(word.removeprefix("--").split("=") for word in shlex.split(command)[1:])
    assert set(options) <= {"nodes", "gpus-per-node", "ntasks-per-node"}
    assert options["gpus-per-node"] == options["ntasks-per-node"]
    project.variables |= {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_NUM_NODES": options["nodes"],
        "SLURM_GPUS_ON_NODE": options["gpus-per-node"],
    }


def collected(project: Project, command: str) -> None:
    """pytest is there and takes the arguments."""
    project.run(f"{command} {'--collect-only -q' if 'tests/' in command.split('run.sh')[1] else '--version'}")


def profiled(project: Project, command: str) -> None:
    """Options are known. Where the file is named, a shipped table is put there, for commands that read it."""
    options_known(project, command)
    words = shlex.split(command)
    if "--output" in words:
        table = ROOT / "distca" / "plan" / "cost" / "tables" / "h200_flash4_32x8x128.json"
        shutil.copy(table, project.folder / words[words.index("--output") + 1])


def options_known(project: Project, command: str) -> None:
    """--help lists every option that the program is given; what starts it is left out."""
    words = shlex.split(re.sub(f"^{ASSIGNMENTS}", "", command))
    if words[0] == "torchrun":
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        assert {word.partition("=")[0] for word in words[1:script]} <= {"--standalone", "--nproc-per-node", "4"}
        words = ["python", *words[script:]]
    if words[:2] == ["python", "-m"]:
        words = ["python", words[2].replace(".", "/") + ".py", *words[3:]]
    words = words[: words.index("--")] if "--" in words else words
    place = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    program = shlex.join([*words[:place], "--help"])
    if program not in project.help:
        project.help[program] = help_of(words[:place])
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [option for option in options if not re.search(rf"{option}\b", project.help[program])] == []


def help_of(words: list[str]) -> str:
    """What a program says to --help, in this process, which has imported what it needs."""
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as ended:
        distca_command([*words[1:], "--help"]) if words[0] == "distca" else run_script(words[1], "--help")
    assert not ended.value.code, said.getvalue()
    return said.getvalue()


def run_script(path: str, *arguments: str) -> None:
    script = ROOT / path
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron-Core, when it is imported
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.syspath_prepend(str(script.parent))
        runpy.run_path(str(script), run_name="__main__")


Rule = Callable[[Project, str], None]
RULES: list[tuple[str, Rule]] = [
    (r"git clone .*", shown),
    (r"python3\.12 -m venv \.venv|source \.venv/bin/activate|pre-commit install|\.ci/run", parsed),
    (r"pip install .*", pip_install),
    (r"bash tests/run\.sh.*", collected),
    (r"bash pretrain_llama\.sh", first_run),
    (rf"{ASSIGNMENTS}RESUME=latest .*", go_on),
    (rf"{ASSIGNMENTS}INIT_FROM=.*", from_folder),
    (r"bash pretrain_llama\.sh --help|python pretrain_llama\.py --help", as_it_stands),
    (rf"{ASSIGNMENTS}bash (pretrain_llama|benchmarks/example-[34]d-parallel/run[34]d)\.sh.*", checked),
    (r"distca checkpoint .*", checkpoint_command),
    (r"sbatch .*", submitted),
    (r"salloc .*", allocated),
    (rf"{ASSIGNMENTS}torchrun .*|python (benchmarks/\w+\.py|-m benchmarks\.\w+).*", options_known),
    (r"distca profile.*", profiled),
    (r"distca (parity|simulate).*", options_known),
    (r"distca data (preview|describe) .*talks\.jsonl.*", conversations),
    (r"distca (doctor|plan|data) ?.*|python docs/\w+\.py", as_it_stands),
]


def rule_of(command: str) -> Rule | None:
    return next((rule for pattern, rule in RULES if re.fullmatch(pattern, command)), None)


def commands(page: Path) -> list[list[tuple[int, str]]]:
    """By block, (line number, command)."""
    found = []
    for block in blocks(page, "bash"):
        lines = [(block.line + place, without_comment(line)) for place, line in enumerate(block.lines)]
        assert not any(line.endswith("\\") for _, line in lines), f"{name_of(page)}: a command takes one line"
        found.append([(number, line) for number, line in lines if line])
    return found


WITH_COMMANDS = [page for page in PAGES if commands(page)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.copied(tmp_path_factory.mktemp("documentation"))


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_work(page: Path, project: Project) -> None:
    for block in commands(page):
        project.variables = {}
        for number, command in block:
            rule = rule_of(command)
            assert rule is not None, f"{name_of(page)}, line {number}: no rule covers {command}"
            if rule is allocated or command not in project.done:
                rule(project, command)
            if not project.variables:  # inside an allocation it is another command
                project.done.add(command)


def test_a_command_without_rule_is_found() -> None:
    assert rule_of("bash pretrain_lama.sh") is None
    assert rule_of("TP=2 rm -r runs") is None


def test_a_command_that_fails_is_found(project: Project) -> None:
    project.variables = {}
    for rule, command in (
        (checked, "TP=2 bash pretrain_llama.sh"),
        (checked, "bash pretrain_llama.sh --train.step 3"),
        (options_known, "python benchmarks/planner.py --outputs FILE"),
        (pip_install, 'pip install -e ".[gpus]"'),
    ):
        with pytest.raises(AssertionError):
            rule(project, command)


@pytest.mark.parametrize("page", ["docs/data.md", "docs/planning.md"])
def test_python_works(page: str) -> None:
    (block,) = blocks(ROOT / page, "python")
    exec(compile("\n".join(block.lines), page, "exec"), {})


def test_pages_have_commands() -> None:
    found = {command for page in WITH_COMMANDS for block in commands(page) for _, command in block}
    assert {"bash pretrain_llama.sh", "bash tests/run.sh", "distca doctor"} <= found
    assert len(found) > 30
