"""run3d.sh and run4d.sh: the commands that they would start."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.throughput.launch import launch as launch_modes
from distca.train.config.variable import Launcher
from tests.train.launch.machine import launched

ROOT = Path(__file__).parents[2]
RUN_3D = ROOT / "benchmarks" / "example-3d-parallel" / "run3d.sh"
RUN_4D = ROOT / "benchmarks" / "example-4d-parallel" / "run4d.sh"
# It starts no ranks either; the real one takes over where a test sets REAL_PYTHON.
STAND_IN = f"""
if [[ -n $REAL_PYTHON || "$*" == *benchmarks.throughput.launch* ]]; then exec {shlex.quote(sys.executable)} "$@"; fi
if [[ $1 == - ]]; then exit 0; fi
if [[ -n $STAYS && $1 == -m && ( $2 == torch.distributed.run || $2 == distca.cluster.torchrun ) ]]; then
    trap 'echo told; echo told >> "$STAYS"; exit 1' TERM
    echo up > "$STAYS"
    for _ in {{1..4000}}; do sleep 0.05; done
fi
echo "$@"
"""


def environment(**variables):
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {"DRY_RUN": "1", "GPUS_PER_NODE": "0", "NAME": "test"} | variables


def run(script, *arguments, **variables):
    return subprocess.run(
        ["bash", str(script), *arguments],
        env=environment(**variables),
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def launch(script, *arguments, **variables):
    """What :func:`run` gives, from this process."""
    launcher = {RUN_3D: Launcher.RUN_3D, RUN_4D: Launcher.RUN_4D}[script]
    return launched(lambda: launch_modes(launcher, list(arguments)), environment(**variables), ROOT.parent)


def copied(script, folder):
    """The script in a copy of what it needs, so that its logs go there."""
    sources = [*(ROOT / "distca").rglob("*.py"), *(ROOT / "benchmarks" / "throughput").glob("*.py")]
    for path in (*sources, ROOT / "benchmarks" / "__init__.py", ROOT / "scripts" / "python.sh", script):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return folder / script.relative_to(ROOT)


@pytest.fixture(scope="module", autouse=True)
def quick_python(tmp_path_factory):
    """A Python first on PATH that has everything and finds nothing wrong, so that commands are made quickly."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "python").write_text(f"#!/bin/bash\n{STAND_IN}\n")
    (folder / "python").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield folder


def command(script, *arguments, **variables):
    result = (launch if script in (RUN_3D, RUN_4D) else run)(script, *arguments, **variables)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout.splitlines()[-1])


def following(words, option):
    """The words after an option, up to the next one."""
    rest = words[words.index(option) + 1 :]
    return rest[: next((at for at, word in enumerate(rest) if word.startswith("--")), len(rest))]


def test_all_modes_of_both_mixes_on_four_cpu_ranks():
    words = command(RUN_3D)
    assert "--nproc-per-node=4" in words and "OMP_NUM_THREADS=1" in words
    assert following(words, "--modes") == ["all"]
    assert following(words, "--mixes") == ["pretrain", "prolong"]
    assert following(words, "--output") == ["benchmarks/example-3d-parallel/logs/test"]
    assert ("--config", "configs/tiny.yaml") in pairwise(words)
    assert not (RUN_3D.parent / "logs" / "test").exists()


@pytest.mark.parametrize(
    ("variables", "option", "words"),
    [
        ({"MODE": "distca cp ring2 cp-keep", "CP_SIZE": "2"}, "--modes", ["distca", "cp2", "ring2", "cp2-keep"]),
        ({"MODE": "ulysses packed-dealt", "TP_SIZE": "2"}, "--modes", ["ulysses2", "packed-dealt"]),
        ({"MODE": "distca distca-unsplit"}, "--modes", ["distca", "distca-unsplit"]),
        ({"CP_SIZE": "2"}, "--degree", ["2"]),
        ({"MIX": "prolong"}, "--mixes", ["prolong"]),
        ({"CONTEXT_LENGTH": "256 512"}, "--contexts", ["256", "512"]),
        ({"BATCHES": "7"}, "--batches", ["7"]),
        ({"LAYERS": "3"}, "--model.layers", ["3"]),
        ({"TP_SIZE": "2"}, "--parallel.tp", ["2"]),
        ({"TOKENS_PER_RANK": "640"}, "--data.tokens_per_rank", ["640"]),
        ({"MICRO_BATCHES": "3"}, "--train.micro_batches", ["3"]),
        ({}, "--train.recompute", ["none"]),
        ({"RECOMPUTE": "mlp"}, "--train.recompute", ["mlp"]),
    ],
)
def test_variables(variables, option, words):
    assert following(command(RUN_3D, **variables), option) == words


@pytest.mark.parametrize("script", [RUN_3D, RUN_4D])
def test_modes_of_unmodified_megatron_have_starts_of_their_own(script):
    result = launch(script, MODE="distca megatron-te-p2p packed megatron-te", NAME="test")
    assert result.returncode == 0, result.stderr
    starts = [shlex.split(line) for line in result.stdout.splitlines() if line.startswith("env ")]
    ranks = following(starts[1], "--modes")[0][len("megatron-te")]
    modes = [following(words, "--modes") for words in starts]
    assert modes == [["distca", "packed"], [f"megatron-te{ranks}-p2p"], ["megatron-te"]] and int(ranks) > 1
    assert len({tuple(following(words, "--output")) for words in starts}) == 1


def test_stages_belong_to_run4d():
    words = command(RUN_4D, "--cad.tolerance", "0.02")
    assert following(words, "--modes") == ["distca", "packed"]
    assert ("--parallel.pp", "2") in pairwise(words) and ("--train.micro_batches", "4") in pairwise(words)
    assert words[-2:] == ["--cad.tolerance", "0.02"]
    assert "run4d.sh" in launch(RUN_3D, PP_SIZE="2").stderr
    assert "warning: MIXX" not in run(RUN_3D, MIXX="2").stderr, "short names are alike by chance"
    assert "warning: BATCHEZ is '2'" in run(RUN_3D, BATCHEZ="2").stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CP": "2"}, "did you mean CP_SIZE"),
        ({"PINGPONG": "0"}, "append --cad.ping_pong false, or unset PINGPONG."),
        ({"PING_PONG": "0"}, "PING_PONG is not a variable of run3d.sh."),
        ({"PING_PONG": "0"}, "append --cad.ping_pong false, or unset PING_PONG."),
        ({"PING_PONG": "1"}, "append --cad.ping_pong true,"),
        ({"CAD": "0"}, "choose distca (balanced attention) or packed (attention at home) with MODE,"),
        ({"BACKWARD": "resend"}, "append --cad.backward resend,"),
        ({"CONFIG": "x.yaml"}, "append --config x.yaml,"),
        ({"ENABLE_NSYS": "1"}, "use it with pretrain_llama.sh,"),
        ({"RESUME": "latest"}, "let every mode begin anew without it,"),
        ({"DATA_PATH": "x"}, "choose the documents' lengths with MIX,"),
        ({"STEPS": "4"}, "rename it to BATCHES, or unset STEPS."),
        ({"EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB": "4"}, "append --cad.nvshmem_buffer_gb 4,"),
        ({"EXPERIMENT_LOG_MEMORY_USAGE": "1"}, "read peak memory in table.md,"),
        ({"NAME": "a/b"}, "NAME is 'a/b'; it must be a folder's name without slashes."),
        ({"SEQ_LEN": "2"}, "did you mean CONTEXT_LENGTH"),
        ({"DISTCA_MODE": "x"}, "There is no variable DISTCA_MODE"),
        (
            {"MODE": "distca,packed"},
            "MODE is 'distca,packed'; it must be all, or, with spaces between, some of distca,",
        ),
        ({"MIX": "pretrain,prolong"}, "it must be pretrain or prolong, or several with spaces between."),
        ({"WARM_UP": "-1"}, "WARM_UP is '-1'; it must be a whole number of at least 0."),
        ({"CP_SIZE": "3"}, "CP_SIZE is 3"),
        ({"CP_SIZE": "2", "MODE": "distca packed"}, "no mode of 'distca packed' takes it"),
        ({"RECOMPUTE": "1"}, "RECOMPUTE is '1'; it must be none, mlp, all or auto."),
        ({"TP_SIZE": "3"}, "cannot be divided by TP_SIZE = 3."),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK is 2, but NNODES is 2"),
        ({"BATCHES": "0"}, "BATCHES is '0'"),
        ({"CP_SIZE": "18446744073709551616"}, "it must be a whole number from 1 to 999999999."),
        ({"GPUS_PER_NODE": "18446744073709551617"}, "it must be a whole number from 0 to 999999999."),
    ],
)
def test_mistakes_are_sentences(variables, said):
    result = launch(RUN_3D, **variables)
    assert result.returncode == 2
    assert said in result.stderr and "next step:" in result.stderr


def test_settings_that_would_do_nothing_are_refused_together():
    for arguments, named, instead in (
        (("--data.source", "jsonl", "--data.path=X"), "by data.path, data.source.", "use MIX (--mixes) in place of"),
        (("--cad.enabled", "false", "--train.steps", "3"), "by cad.enabled, train.steps.", "use MODE (--modes)"),
        (("--data.context_length", "256"), "by data.context_length.", "use CONTEXT_LENGTH (--contexts) in place of"),
        (("--log.wandb=p", "--checkpoint.export", "X"), "export, log.wandb.", "leave out checkpoint.export, log.wandb"),
        (("--name", "foo", "--data.longer", "error"), "data.longer, name.", "of name; leave out data.longer."),
        (("--parallel.pp", "2"), "by parallel.pp.", "use benchmarks/example-4d-parallel/run4d.sh in place"),
        (("--optimizer.lr", "1"), "by optimizer.lr.", "leave out optimizer.lr."),
    ):
        result = launch(RUN_3D, *arguments)
        assert result.returncode == 2 and result.stdout == ""
        error, step = result.stderr.splitlines()
        assert named in error and instead in step


def test_settings_that_modes_use_and_those_of_a_file_are_taken(tmp_path):
    file = tmp_path / "shared.yaml"
    file.write_text("data: {source: mix, path: pretrain, context_length: 256}\nlog: {every: 5}\ntrain: {steps: 9}\n")
    used = ("--data.tokens_per_rank=48", "--data.vocabulary=64", "--cad.tolerance=0.1", "--train.recompute=mlp")
    used += ("--optimizer.clip_grad=0", f"--config={file}")
    result = run(RUN_3D, *used, REAL_PYTHON="1", CONTEXT_LENGTH="128", RECOMPUTE="")
    assert result.returncode == 0, result.stderr
    assert run(RUN_4D, "--parallel.pp", "4", REAL_PYTHON="1", LAYERS="4").returncode == 0


def test_settings_are_checked_before_any_rank_is_started():
    for script, variables, arguments, said in (
        (RUN_3D, {"MODE": "cp3"}, ("--cad.ping_pong", "false"), "cp3 needs groups of 3 ranks"),
        (RUN_4D, {"LAYERS": "3"}, (), "model.layers 3 is not divisible by parallel.pp 2"),
    ):
        # RANK and LOCAL_RANK are what some schedulers set for each machine.
        result = run(script, *arguments, REAL_PYTHON="1", RANK="1", LOCAL_RANK="1", **variables)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert result.stderr.startswith(f"error: {said}") and len(result.stderr.splitlines()) == 2
    assert run(RUN_3D, "--cad.ping_pong", "false", REAL_PYTHON="1").returncode == 0


def test_slurm_jobs_get_their_cores_and_start_the_ranks_themselves(quick_python):
    (quick_python / "scontrol").write_text("#!/bin/bash\necho host1\n")
    (quick_python / "scontrol").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host1", "SLURM_GPUS_ON_NODE": "8", "GPUS_PER_NODE": ""}
    words = command(RUN_3D, SLURM_JOB_CPUS_PER_NODE="64(x2)", **job)
    assert {"--ntasks-per-node=8", "--cpus-per-task=8", "MASTER_ADDR=host1"} <= set(words)
    twice = launch(RUN_3D, SLURM_STEP_NUM_TASKS="8", **job)
    assert twice.returncode == 2 and "use sbatch benchmarks/example-3d-parallel/run3d.sh" in twice.stderr


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    script = copied(RUN_3D, tmp_path)
    logs = script.parent / "logs"
    for expected in ("test", "test-2", "test-3"):
        assert following(command(script), "--output") == [f"benchmarks/example-3d-parallel/logs/{expected}"]
        assert not (logs / expected).exists()
        result = run(script, DRY_RUN="0")
        assert result.returncode == 0, result.stderr
        assert f"--output benchmarks/example-3d-parallel/logs/{expected} " in (logs / expected / "log.txt").read_text()
    # Other machines write nothing: the first one's ranks have the figures.
    machine = {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "1"}
    assert run(script, DRY_RUN="0", NAME="other", **machine).returncode == 0
    assert not (logs / "other").exists()


def _all_of(reads):
    """What was written, to the end: a terminal hands it on bit by bit, and ends with an error."""
    said = b""
    with open(reads, "rb", buffering=0) as file, suppress(OSError):
        while part := file.read(1 << 16):
            said += part
    return said.decode()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("script", [RUN_3D, pytest.param(RUN_4D, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_and_is_named(tmp_path, number, script, terminal):
    script, ranks = copied(script, tmp_path), tmp_path / "ranks"
    reads, writes = os.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        ["bash", str(script)],
        env=environment(DRY_RUN="0", STAYS=str(ranks)),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=writes,
        start_new_session=True,
        # Bash cannot trap what was ignored when it started, as it is where the tests run in the background.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 100
        while not (ranks.exists() and ranks.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        # Ctrl-C reaches tee and all others in the terminal's foreground, too.
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        code = process.wait(timeout=100)
    finally:
        process.kill()
        os.close(writes)
    said = _all_of(reads)
    assert ranks.read_text().split() == ["up", "told"]
    assert code == 128 + number
    assert f"error: The run was stopped by {number.name}." in said
    log = script.parent / "logs" / "test" / "log.txt"
    assert log.exists() != terminal
    assert terminal or "told" in log.read_text(), "the ranks' last words are in the log"
