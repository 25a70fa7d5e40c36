"""Every command in the documentation works: fenced bash blocks of all pages, line by line, in a copy of the project.

A line is run as it stands, or in a cheaper way by the first rule of RULES that matches it; a line that no rule covers
fails. What commands name is there before: texts, a model's folder, a run. That run alone forks ranks; everywhere else
settings are only checked (DRY_RUN=1), or options looked for in --help.
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
from functools import partial
from pathlib import Path

import pytest

from benchmarks.family_models import write_folder
from distca.commands.main import main as distca_command
from distca.train.launch.installation import CPU_TORCH
from tests.docs.pages import PAGES, ROOT, blocks, name_of, without_comment
from tests.testing import programs

ASSIGNMENTS = r"(?:[A-Z][A-Z_0-9]*=(?:\"[^\"]*\"|\S+) )*"
LAUNCHER = r"bash (pretrain_llama|benchmarks/example-[34]d-parallel/run[34]d)\.sh"
# Of the one run that is really made, and of the one that goes on from it.
SMALL = {"CONTEXT_LENGTH": "256", "TOKENS_PER_RANK": "128"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
ALLOCATION = "--nodes=2 --gpus-per-node=8 --ntasks-per-node=8"
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2, "?": 3}, "unk_token": "?"},
    "pre_tokenizer": {"type": "Whitespace"},
}
CONVERT = "distca data convert --source jsonl --path corpus.jsonl --tokenizer tokenizer.json"
CONVERT += ' --end_token "</s>" --output corpus'  # as docs/data.md has it


@dataclass
class Project:
    """A copy of the project in which commands run, beside programs that stand in for a cluster's.

    Attributes:
        folder: of the copy; code is linked, what commands write into is copied.
        bin: folder of the programs.
        help: what programs said to --help.
    """

    folder: Path
    bin: Path
    help: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def copied(folder: Path) -> Project:
        """A copy into a new folder."""
        made = Project(folder / "distca", folder / "bin")
        shutil.copytree(ROOT / "docs", made.folder / "docs")
        for path in ROOT.iterdir():
            if path.name not in ("docs", ".git", ".venv", "runs"):
                (made.folder / path.name).symlink_to(path)
        made.bin.mkdir()
        made.stand_in("nvidia-smi", "exit 1")  # on every machine the commands of one without GPUs
        made.stand_in("scontrol", "echo node-1; echo node-2")
        made.stand_in("python", f'exec {shlex.quote(sys.executable)} "$@"')
        made.stand_in("distca", f'exec {shlex.quote(sys.executable)} -m distca.commands.main "$@"')
        return made

    def stand_in(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def run(self, command: str, **variables: str) -> str:
        """Run a line of bash; its output. It may not fail."""
        kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR")}
        own = {"PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(self.folder), "COLUMNS": "120"}
        environment = kept | own | {"OMP_NUM_THREADS": "1"} | variables
        ran = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=environment, text=True, capture_output=True, timeout=240
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
        return ran.stdout

    def fork(self, *words: str) -> None:
        """Run a Python program, from a process that has imported what it needs. It may not fail."""
        ran = programs.run(*words, cwd=self.folder, timeout=240, PYTHONPATH=str(self.folder), COLUMNS="120")
        assert ran.returncode == 0, f"{words}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy with all that commands of the pages name."""
    made = Project.copied(tmp_path_factory.mktemp("documentation"))
    write_inputs(made.folder)
    as_it_stands(made, CONVERT)
    return made


def write_inputs(folder: Path) -> None:
    """Texts, a tokenizer, conversations, a cost table and a model's folder, by the names that the pages give them."""
    (folder / "corpus.jsonl").write_text('{"text": "a b a"}\n' * 200 + '{"text": "b a b a"}\n' * 99)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "my" / "texts").mkdir(parents=True)
    (folder / "my" / "texts" / "one.txt").write_text("a text")
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "talks.jsonl").write_text(f"{json.dumps(talk)}\n" * 9)
    shutil.copy(ROOT / "distca/plan/cost/tables/h200_flash4_32x8x128.json", folder / "costs.json")
    write_folder("llama", folder / "path/to/folder")
    (folder / "path/to/folder/tokenizer.json").write_text(json.dumps(TOKENIZER))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    (folder / "path/to/folder/chat_template.jinja").write_text(template)
    (folder / "path/to/Llama-3.1-8B").symlink_to("folder")


def as_it_stands(project: Project, command: str) -> None:
    first, *words = shlex.split(command)
    project.fork(*(["-m", "distca.commands.main"] if first == "distca" else []), *words)


def parsed(project: Project, command: str) -> None:
    """A line of bash, perhaps with <a placeholder> in it."""
    placed = re.sub("<[^>]*>", "placeholder", command)
    project.run(f"bash -n <<'end'\n{placed}\nend")


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
    if (project.folder / "runs").exists():
        return
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
    first_run(project, "bash pretrain_llama.sh")
    checked(project, command, **SMALL)


def submitted(project: Project, command: str) -> None:
    """The script runs as in such a job; options of sbatch are Slurm's."""
    checked(project, command.replace(f"sbatch {ALLOCATION}", "bash"), **JOB)


def collected(project: Project, command: str) -> None:
    """pytest is there and takes the arguments."""
    project.run(f"{command} {'--collect-only -q' if 'tests/' in command.split('run.sh')[1] else '--version'}")


def options_known(project: Project, command: str) -> None:
    """--help lists every option that the program is given; what starts it, and what it names, are left out."""
    words = shlex.split(re.sub(f"^{ASSIGNMENTS}", "", command))
    if words[0] == "torchrun":
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        assert {word.partition("=")[0] for word in words[1:script]} <= {"--standalone", "--nproc-per-node", "4"}
        words = ["python", *words[script:]]
    if words[:2] == ["python", "-m"]:
        words = ["python", words[2].replace(".", "/") + ".py", *words[3:]]
    named = words[: 3 if words[:2] == ["distca", "checkpoint"] else 2]
    program = shlex.join([*named, "--help"])
    if program not in project.help:
        project.help[program] = help_of(named)
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
    (r"git clone .*|python3\.12 -m venv \.venv|source \.venv/bin/activate|pre-commit install|\.ci/run", parsed),
    (rf"salloc {ALLOCATION}", parsed),
    (r"pip install .*", pip_install),
    (r"bash tests/run\.sh.*", collected),
    (r"bash pretrain_llama\.sh", first_run),
    (rf"{ASSIGNMENTS}RESUME=latest .*", go_on),
    (rf"{ASSIGNMENTS}INIT_FROM=.* CONTEXT_LENGTH=131072 .*", partial(checked, TOKENS_PER_RANK="131072")),
    (rf"{ASSIGNMENTS}{LAUNCHER}.*", checked),
    (rf"sbatch {ALLOCATION} .*", submitted),
    (rf"{ASSIGNMENTS}torchrun .*|python (benchmarks/\w+\.py|-m benchmarks\.\w+).*", options_known),
    (r"distca (checkpoint|profile|parity|simulate) .*", options_known),
    (re.escape(CONVERT), lambda project, command: None),  # the copy of the project begins with it
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


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_work(page: Path, project: Project) -> None:
    for block in commands(page):
        allocated = False
        for number, command in block:
            rule = rule_of(command)
            assert rule is not None, f"{name_of(page)}, line {number}: no rule covers {command}"
            submitted(project, command) if allocated else rule(project, command)
            allocated = allocated or command.startswith("salloc")


def test_a_command_without_rule_is_found() -> None:
    assert rule_of("bash pretrain_lama.sh") is None
    assert rule_of("TP=2 rm -r runs") is None


def test_a_command_that_fails_is_found(project: Project) -> None:
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
