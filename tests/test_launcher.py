"""pretrain_llama.sh, with stand-ins for srun, scontrol, nvidia-smi, nsys and torchrun on PATH, and no network."""

import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from distca.train.config.cli import known_settings

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "pretrain_llama.sh"

# Each stand-in writes its name, arguments and some environment, one a line, into $RECORD.
RECORDER = """#!/bin/bash
{
    basename "$0"
    printf '%s\\n' "$@"
    env | grep -E '^(OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|MASTER_|WORLD_SIZE)'
} > "$RECORD"
"""
# It runs until it is told to end, and then ends as torchrun does; after a while by itself, so that none is left over.
STAYS = """#!/bin/bash
trap 'echo told >> "$RECORD"; exit 1' TERM
echo up > "$RECORD"
for _ in {1..400}; do sleep 0.05; done
"""


@pytest.fixture
def machine(tmp_path: Path):
    """A machine whose PATH has the system's tools, this Python and stand-ins."""
    return Machine(tmp_path)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.record = folder / "record"
        # A Python that has everything, so that nothing is installed, and finds nothing wrong with any settings.
        is_torchrun = '"$1 $2" == "-m torch.distributed.run" || "$1 $2" == "-m distca.cluster.torchrun"'
        self._start = f'if [[ {is_torchrun} ]]; then shift 2; exec torchrun "$@"; fi'
        self._launch = f'if [[ "$*" == *distca.train.launch.* ]]; then exec {shlex.quote(sys.executable)} "$@"; fi'
        nothing_wrong = '[[ $1 == -* || $2 == --check ]] && exit 0; echo "python was started: $*" >&2; exit 1'
        self.tool("python", f"#!/bin/bash\n{self._start}\n{self._launch}\n{nothing_wrong}\n")
        self.tool("torchrun", RECORDER)
        self.variables = {"PATH": f"{self.bin}:/usr/bin:/bin", "RECORD": str(self.record), "HOME": str(folder)}

    def tool(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def checks_settings(self) -> None:
        """Let the real Python check settings."""
        self.tool("python", f'#!/bin/bash\n{self._start}\nexec {shlex.quote(sys.executable)} "$@"\n')

    def gpus(self, count: int) -> None:
        lines = "".join(f"echo 'GPU {number}: NVIDIA H100 80GB HBM3 (UUID: x)'\n" for number in range(count))
        self.tool("nvidia-smi", f"#!/bin/bash\n{lines}")

    def slurm(self, nodes: int, gpus: int | str | None, **variables: str) -> None:
        self.tool("srun", RECORDER)
        hosts = "".join(f"echo host{number}\n" for number in range(1, nodes + 1))
        self.tool("scontrol", f'#!/bin/bash\n[[ "$*" == "show hostnames host[1-{nodes}]" ]] || exit 1\n{hosts}')
        self.variables |= {
            "SLURM_JOB_ID": "20017",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": f"host[1-{nodes}]",
        }
        if gpus is not None:
            self.variables["SLURM_GPUS_ON_NODE"] = str(gpus)
        self.variables |= variables

    def requeues(self) -> None:
        """Let Slurm's job be requeued, which is recorded."""
        hosts, requeue = self.bin / "scontrol", '[[ $1 == requeue ]] && echo "$@" >> "$RECORD" && exit'
        self.tool("scontrol", hosts.read_text().replace("#!/bin/bash", f"#!/bin/bash\n{requeue}"))

    def run(self, *arguments: str, script: Path = SCRIPT, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script), *arguments],
            env=self.variables | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def dry(self, *arguments: str, **variables: str) -> list[str]:
        result = self.run(*arguments, DRY_RUN="1", **variables)
        assert result.returncode == 0, result.stderr
        assert not self.record.exists(), "a dry run started something"
        return shlex.split(result.stdout)


def has_pair(command: list[str], option: str, value: str) -> bool:
    return (option, value) in pairwise(command)


def test_cpu_machine_starts_four_ranks_of_the_tiny_run(machine: Machine) -> None:
    result = machine.run()
    assert result.returncode == 0, result.stderr
    recorded = machine.record.read_text().splitlines()
    assert recorded[:3] == ["torchrun", "--nproc-per-node=4", "--standalone"]
    assert recorded[3] == str(ROOT / "pretrain_llama.py")
    assert has_pair(recorded, "--config", str(ROOT / "configs" / "tiny.yaml"))
    assert "OMP_NUM_THREADS=1" in recorded
    assert "4 CPU ranks" in result.stderr


def test_gpu_machine_starts_a_rank_per_gpu(machine: Machine) -> None:
    machine.gpus(2)
    command = machine.dry()
    assert "--nproc-per-node=2" in command
    assert has_pair(command, "--config", str(ROOT / "configs" / "llama-8b-cut.yaml"))
    assert not [word for word in command if word.startswith("OMP_NUM_THREADS")]
    assert "--nproc-per-node=1" in machine.dry(GPUS_PER_NODE="1")


def test_a_folder_to_begin_with_says_the_shape(machine: Machine) -> None:
    command = machine.dry(INIT_FROM="folder")
    assert has_pair(command, "--config", str(ROOT / "configs" / "from-folder-tiny.yaml"))
    assert has_pair(command, "--checkpoint.init_from", "folder")
    tiny = ROOT / "configs" / "tiny.yaml"
    assert has_pair(machine.dry(INIT_FROM="folder", CONFIG=str(tiny)), "--config", str(tiny))
    machine.gpus(2)
    assert has_pair(machine.dry(INIT_FROM="folder"), "--config", str(ROOT / "configs" / "from-folder.yaml"))
    argument = machine.dry("--checkpoint.init_from", "folder")
    assert has_pair(argument, "--config", str(ROOT / "configs" / "from-folder.yaml"))


@pytest.mark.parametrize(
    ("visible", "ranks"), [("0,1", 2), ("3", 1), ("0,1,2,3", 4), ("1,9,2", 1), ("GPU-8932f937,GPU-d1", 2), ("", 4)]
)
def test_only_visible_gpus_count(machine: Machine, visible: str, ranks: int) -> None:
    """None at all are four CPU ranks."""
    machine.gpus(4)
    command = machine.dry(CUDA_VISIBLE_DEVICES=visible, MODEL="tiny")
    assert f"--nproc-per-node={ranks}" in command
    assert ("CUDA_VISIBLE_DEVICES=" in command) == (not visible)


def test_gpus_per_node_0_uses_the_cpu(machine: Machine) -> None:
    machine.gpus(2)
    command = machine.dry(GPUS_PER_NODE="0")
    assert "--nproc-per-node=4" in command
    assert "CUDA_VISIBLE_DEVICES=" in command


@pytest.mark.parametrize(
    ("variable", "value", "options"),
    [
        ("NAME", "try", {"--name": "try"}),
        ("INIT_FROM", "some/folder", {"--checkpoint.init_from": "some/folder"}),
        ("RESUME", "latest", {"--checkpoint.resume": "latest"}),
        ("TP_SIZE", "2", {"--parallel.tp": "2"}),
        ("PP_SIZE", "2", {"--parallel.pp": "2"}),
        ("STEPS", "7", {"--train.steps": "7"}),
        ("CONTEXT_LENGTH", "2048", {"--data.context_length": "2048"}),
        ("TOKENS_PER_RANK", "512", {"--data.tokens_per_rank": "512"}),
        ("MICRO_BATCHES", "3", {"--train.micro_batches": "3"}),
        ("SEED", "5", {"--train.seed": "5", "--data.seed": "5"}),
        ("DATA_SOURCE", "text", {"--data.source": "text"}),
        ("DATA_PATH", "a b", {"--data.path": "a b"}),
        ("CAD", "0", {"--cad.enabled": "false"}),
        ("CAD", "1", {"--cad.enabled": "true"}),
        ("PING_PONG", "0", {"--cad.ping_pong": "false"}),
        ("BACKWARD", "resend", {"--cad.backward": "resend"}),
        ("EXPERIMENT_LOG_MEMORY_USAGE", "1", {"--log.memory": "true"}),
        ("EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB", "2.5", {"--cad.nvshmem_buffer_gb": "2.5"}),
        ("MODEL", "34b", {"--config": str(ROOT / "configs" / "llama-34b.yaml")}),
        ("CONFIG", str(ROOT / "configs" / "llama-8b.yaml"), {"--config": str(ROOT / "configs" / "llama-8b.yaml")}),
    ],
)
def test_each_variable_takes_effect(machine: Machine, variable: str, value: str, options: dict[str, str]) -> None:
    command = machine.dry(**{variable: value})
    for option, expected in options.items():
        assert has_pair(command, option, expected)
        assert option == "--config" or option.removeprefix("--") in known_settings()
        assert not has_pair(machine.dry(), option, expected), "the default already says so: this test shows nothing"


def test_arguments_are_passed_on_and_an_own_config_replaces_the_default(machine: Machine) -> None:
    command = machine.dry("--config", "mine.yaml", "--optimizer.lr", "1e-3")
    assert has_pair(command, "--config", "mine.yaml")
    assert has_pair(command, "--optimizer.lr", "1e-3")
    assert command.count("--config") == 1


def test_slurm_job_starts_a_task_per_gpu_on_all_nodes(machine: Machine) -> None:
    machine.slurm(2, 8, SLURM_JOB_CPUS_PER_NODE="64(x2)")
    result = machine.run("--train.steps", "30", TP_SIZE="4")
    assert result.returncode == 0, result.stderr
    recorded = machine.record.read_text().splitlines()
    assert recorded[0] == "srun"
    assert {"--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=8"} <= set(recorded)
    assert {"MASTER_ADDR=host1", "MASTER_PORT=20017", "WORLD_SIZE=16"} <= set(recorded)
    assert has_pair(recorded, "--parallel.tp", "4")
    assert has_pair(recorded, "--train.steps", "30")


def test_slurm_tasks_know_their_rank(machine: Machine) -> None:
    machine.slurm(1, 2)
    command = machine.dry()
    task = command[command.index("bash") :]
    program = task.index("python")
    shown = [*task[:program], "bash", "-c", "echo $RANK $LOCAL_RANK"]
    variables = machine.variables | {"SLURM_PROCID": "11", "SLURM_LOCALID": "3"}
    result = subprocess.run(shown, env=variables, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["11", "3"]


def test_slurm_gpu_count_with_a_type(machine: Machine) -> None:
    machine.slurm(1, None, SLURM_GPUS_PER_NODE="h100:4")
    assert "--ntasks-per-node=4" in machine.dry()


def test_slurm_gpus_of_the_whole_job(machine: Machine) -> None:
    machine.slurm(2, None, SLURM_GPUS="h100:8")
    assert "--ntasks-per-node=4" in machine.dry()
    said = machine.run(SLURM_GPUS="7", DRY_RUN="1")
    assert (said.returncode, "SLURM_GPUS is 7, which 2 nodes cannot share equally." in said.stderr) == (2, True)


def test_gpus_of_gres_are_what_scontrol_says(machine: Machine) -> None:
    """From a login node inside salloc, where no variable tells them."""
    machine.slurm(2, None)
    hosts = machine.bin.joinpath("scontrol").read_text().replace("exit 1", "show_job")
    shown = "JobId=20017 AllocTRES=cpu=64,mem=1T,node=2,billing=64,gres/gpu=4,gres/gpu:h100=4 OverSubscribe=NO"
    machine.tool("scontrol", hosts.replace("#!/bin/bash\n", f"#!/bin/bash\nshow_job() {{ echo '{shown}'; exit; }}\n"))
    assert "--ntasks-per-node=2" in machine.dry()


def test_the_users_address_wins_over_slurms(machine: Machine) -> None:
    machine.slurm(2, 8)
    assert "MASTER_ADDR=ib-host1" in machine.dry(MASTER_ADDR="ib-host1")


def test_sbatch_runs_a_copy_from_another_folder(machine: Machine) -> None:
    machine.slurm(1, 2)
    copy = machine.folder / "slurm_script"
    shutil.copy(SCRIPT, copy)
    result = machine.run(script=copy, SLURM_SUBMIT_DIR=str(ROOT), DRY_RUN="1")
    assert str(ROOT / "pretrain_llama.py") in shlex.split(result.stdout), result.stderr
    lost = machine.run(script=copy, SLURM_SUBMIT_DIR=str(machine.folder))
    assert lost.returncode == 2
    assert lost.stderr.startswith("error: ") and "submit the job from the project's folder" in lost.stderr


@pytest.mark.parametrize(("variables", "said"), [({}, True), ({"GPUS_PER_NODE": "2"}, False)])
def test_a_slurm_job_without_known_gpus_says_so(machine: Machine, variables: dict[str, str], said: bool) -> None:
    machine.slurm(1, None)
    result = machine.run(DRY_RUN="1", **variables)
    assert result.returncode == 0
    assert ("so ranks run on CPUs" in result.stderr and "set GPUS_PER_NODE" in result.stderr) == said
    assert ("--ntasks-per-node=4" in result.stdout) == said


def test_a_slurm_job_without_scontrol_is_a_sentence(machine: Machine) -> None:
    machine.slurm(1, 2)
    (machine.bin / "scontrol").unlink()
    # The machine of the test may have Slurm in a folder of the system.
    tools = machine.folder / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    result = machine.run(PATH=f"{machine.bin}:{tools}")
    assert result.returncode == 2
    assert result.stderr.startswith("error: This is a Slurm job, but Slurm's scontrol is not on PATH.")
    assert len(result.stderr.splitlines()) == 2
    machine.tool("scontrol", "#!/bin/bash\nexit 1\n")
    assert machine.run().stderr.startswith("error: scontrol does not name the job's machines.")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_GPUS_ON_NODE": "N/A"}, "SLURM_GPUS_ON_NODE is 'N/A', which names no number of GPUs."),
        ({"SLURM_GPUS_PER_NODE": "gres:gpu"}, "SLURM_GPUS_PER_NODE is 'gres:gpu', which names no number of GPUs."),
        ({"SLURM_GPUS_PER_NODE": "10000000000"}, "SLURM_GPUS_PER_NODE is '10000000000', which names no number"),
        ({"SLURM_JOB_NUM_NODES": "N/A"}, "SLURM_JOB_NUM_NODES is 'N/A'; it must be a whole number from 1 to"),
        ({"SLURM_STEP_NUM_TASKS": "N/A"}, "SLURM_STEP_NUM_TASKS is 'N/A'"),
        ({"SLURM_JOB_ID": "20017_1"}, "SLURM_JOB_ID is '20017_1'"),
    ],
)
def test_what_slurm_says_and_cannot_be_used_is_a_sentence(
    machine: Machine, variables: dict[str, str], said: str
) -> None:
    machine.slurm(1, None, **variables)
    result = machine.run()
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {said}")
    assert len(result.stderr.splitlines()) == 2
    assert not machine.record.exists()


def test_a_slurm_job_that_lists_no_machines_is_a_sentence(machine: Machine) -> None:
    machine.slurm(1, 2)
    del machine.variables["SLURM_JOB_NODELIST"]
    result = machine.run()
    assert result.returncode == 2
    assert result.stderr.startswith("error: This is a Slurm job, but SLURM_JOB_NODELIST does not name its machines.")
    assert len(result.stderr.splitlines()) == 2


def test_machines_without_slurm(machine: Machine) -> None:
    machine.gpus(8)
    command = machine.dry(NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500"} <= set(command)
    assert "--standalone" not in command


def test_nsys_wraps_the_ranks(machine: Machine) -> None:
    machine.tool("nsys", RECORDER)
    command = machine.dry(ENABLE_NSYS="1", NAME="look")
    assert command.index("nsys") < command.index("distca.cluster.torchrun")
    assert "--output=runs/nsys/look-node0" in command


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TPSIZE": "2"}, "did you mean TP_SIZE?"),
        ({"TP": "2"}, "did you mean TP_SIZE?"),
        ({"NUM_NODES": "2"}, "did you mean NNODES?"),
        ({"MICROBATCHES": "2"}, "did you mean MICRO_BATCHES?"),
        ({"CONTEXT": "2"}, "did you mean CONTEXT_LENGTH?"),
        ({"DP_SIZE": "2"}, "all ranks that other parallelism leaves are data parallel"),
        ({"CP_SIZE": "2"}, "CP_SIZE is not a variable of pretrain_llama.sh."),
        ({"RECOMPUTE": "mlp"}, "append --train.recompute mlp, or unset RECOMPUTE."),
        ({"LAYERS": "3"}, "append --model.layers 3,"),
        ({"NUM_LAYERS": "3"}, "append --model.layers 3, or unset NUM_LAYERS."),
        ({"BATCHES": "3"}, "rename it to STEPS, or unset BATCHES."),
        ({"WARM_UP": "3"}, "append --optimizer.warmup_steps 3,"),
        ({"MODE": "packed"}, "set CAD to 1 (distca) or 0 (packed),"),
        ({"MIX": "prolong"}, "set DATA_SOURCE=mix and DATA_PATH to pretrain or prolong,"),
        ({"LINK_CHANNELS": "2"}, "use it with benchmarks/example-3d-parallel/run3d.sh,"),
        ({"DISTCA_DEBUG": "1"}, "There is no variable DISTCA_DEBUG"),
        ({"EXPERIMENT_FOO": "1"}, "There is no variable EXPERIMENT_FOO"),
        ({"STEPS": "ten"}, "STEPS is 'ten'; it must be a whole number of at least 1."),
        ({"STEPS": "0"}, "STEPS is '0'"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999'; it must be a whole number from 1 to 65535."),
        ({"TP_SIZE": "18446744073709551616"}, "it must be a whole number from 1 to 999999999."),
        ({"NNODES": "4294967296"}, "NNODES is '4294967296'; it must be a whole number from 1 to 999999999."),
        ({"GPUS_PER_NODE": "18446744073709551617"}, "it must be a whole number from 0 to 999999999."),
        ({"CAD": "yes"}, "CAD is 'yes'; it must be 0 or 1."),
        ({"BACKWARD": "send"}, "BACKWARD is 'send'; it must be auto, keep or resend."),
        ({"MODEL": "70b"}, "MODEL is '70b'"),
        ({"EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB": "2GB"}, "must be a number of GiB"),
        ({"TP_SIZE": "3"}, "The 4 ranks (1 node × 4) cannot be divided by TP_SIZE × PP_SIZE = 3."),
        ({"NNODES": "2"}, "MASTER_ADDR and NODE_RANK are not both set"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK is 2, but NNODES is 2"),
        ({"GPUS_PER_NODE": "1"}, "GPUS_PER_NODE is 1, but this machine has 0 GPUs."),
        ({"ENABLE_NSYS": "1"}, "nsys is not on PATH"),
        ({"MODEL": "tiny", "CONFIG": "configs/tiny.yaml"}, "MODEL and CONFIG are both set"),
        ({"MODEL": "tiny", "INIT_FROM": "folder"}, "MODEL and INIT_FROM are both set"),
        ({"CONFIG": "nowhere.yaml"}, "There is no configuration file nowhere.yaml."),
    ],
)
def test_mistakes_are_one_sentence(machine: Machine, variables: dict[str, str], said: str) -> None:
    result = machine.run(**variables)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert "next step: " in result.stderr
    assert not machine.record.exists()


def test_an_empty_variable_says_nothing(machine: Machine) -> None:
    assert machine.dry(TP="", MODE="", STEPS="") == machine.dry()


@pytest.mark.parametrize("variables", [{}, {"DRY_RUN": "1"}])
def test_settings_are_checked_once_before_any_rank_is_started(machine: Machine, variables: dict[str, str]) -> None:
    machine.checks_settings()
    # RANK and LOCAL_RANK are what some schedulers set for each machine.
    result = machine.run("--optimizer.warmup_steps", "10", STEPS="5", RANK="1", LOCAL_RANK="1", **variables)
    assert result.returncode == 2
    assert result.stderr.startswith("error: optimizer.warmup_steps is 10, but train.steps is 5;")
    assert len(result.stderr.splitlines()) == 2
    assert not machine.record.exists()


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_the_ranks_and_is_named(machine: Machine, number: int, name: str) -> None:
    machine.tool("torchrun", STAYS)
    script = subprocess.Popen(
        ["bash", str(SCRIPT)],
        env=machine.variables,
        cwd=machine.folder,
        stderr=subprocess.PIPE,
        text=True,
        # Bash cannot trap what was ignored when it started, as it is where the tests run in the background.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 30
        while not (machine.record.exists() and machine.record.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        script.send_signal(number)
        said = script.communicate(timeout=30)[1].splitlines()
    finally:
        script.kill()
    assert machine.record.read_text().split() == ["up", "told"]
    assert script.returncode == 128 + number
    assert said[-2] == f"error: The run was stopped by {name}."
    assert said[-1].startswith("next step: RESUME=latest goes on from the last checkpoint")
    assert not [line for line in said if "ended early" in line]


# Ranks that save when they are told to, below what started them, and that begin to listen to SIGUSR1 late.
SAVES = f"""#!/bin/bash
RANK=0 {sys.executable} -c '
import os, signal, sys, time
def save(*_):
    print("saved", file=record, flush=True)
    sys.exit()
record = open(os.environ["RECORD"], "a")
signal.signal(signal.SIGTERM, save)
print("up", file=record, flush=True)
time.sleep(1)
signal.signal(signal.SIGUSR1, save)
time.sleep(20)' &
trap 'echo the starter was told >> "$RECORD"' TERM
wait
"""


@pytest.mark.parametrize(
    "number,early,requeued",
    [(signal.SIGUSR1, False, True), (signal.SIGUSR1, True, True), (signal.SIGTERM, False, False)],
)
def test_ranks_are_told_to_save_and_a_job_whose_time_is_over_is_requeued(
    machine: Machine, number: int, early: bool, requeued: bool
) -> None:
    """torchrun itself would end them half a minute later. At preemption and scancel nothing is requeued by us. The
    signal is not lost while settings are checked, before there are any ranks."""
    machine.slurm(1, 0)
    machine.tool("srun", SAVES)
    machine.requeues()
    checking = machine.folder / "checking"
    if early:
        slow = f"[[ $2 == --check ]] && touch {checking} && sleep 1"
        python = machine.bin.joinpath("python").read_text()
        machine.tool("python", python.replace("#!/bin/bash", f"#!/bin/bash\n{slow}"))
    script = subprocess.Popen(
        ["bash", str(SCRIPT)],
        env=machine.variables,
        cwd=machine.folder,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 30
        while not (checking if early else machine.record).exists() and time.monotonic() < end:
            time.sleep(0.05)
        script.send_signal(number)
        said = script.communicate(timeout=30)[1]
    finally:
        script.kill()
    assert script.returncode == 0, said
    assert machine.record.read_text().splitlines() == ["up", "saved"] + ["requeue 20017"] * requeued
    assert ("Slurm starts job 20017 again." in said) == requeued


def test_a_requeued_job_goes_on_with_what_it_saved(machine: Machine) -> None:
    machine.slurm(1, 2)
    assert not has_pair(machine.dry(SLURM_RESTART_COUNT="0"), "--checkpoint.resume", "job")
    assert has_pair(machine.dry(SLURM_RESTART_COUNT="1"), "--checkpoint.resume", "job")
    assert has_pair(machine.dry(SLURM_RESTART_COUNT="1", NAME="a"), "--checkpoint.resume", "auto")
    assert has_pair(machine.dry(SLURM_RESTART_COUNT="1", RESUME="latest"), "--checkpoint.resume", "latest")
    header = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=B:USR1@300", "--open-mode=append"} <= set(header)


def test_a_run_that_fails_by_itself_says_where_to_look(machine: Machine) -> None:
    machine.tool("torchrun", "#!/bin/bash\nexit 7\n")
    result = machine.run()
    assert result.returncode == 7
    assert "error: The run ended early, with exit code 7; the log above names the rank" in result.stderr


def test_help_is_shown_once(machine: Machine) -> None:
    machine.checks_settings()
    result = machine.run("--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--train.steps") == 2, "usage and description"
    assert not machine.record.exists()


def test_contradictions_with_slurm_and_arguments(machine: Machine) -> None:
    result = machine.run("--train.steps=4", STEPS="3")
    assert (result.returncode, "STEPS and --train.steps are both given" in result.stderr) == (2, True)
    result = machine.run(CAD="0", PING_PONG="1")
    assert (result.returncode, "PING_PONG is 1, but CAD is 0" in result.stderr) == (2, True)
    machine.slurm(2, 8)
    result = machine.run(NNODES="4")
    assert (result.returncode, "NNODES is 4, but the Slurm job has 2 nodes." in result.stderr) == (2, True)
    result = machine.run(SLURM_STEP_NUM_TASKS="16")
    assert (result.returncode, "it starts the ranks itself" in result.stderr) == (2, True)


def test_missing_dependencies_are_installed_beside_the_script(machine: Machine) -> None:
    """A copy of the project, a Python without dependencies, and a stand-in for it that records pip's calls."""
    project = machine.folder / "project"
    (project / "configs").mkdir(parents=True)
    for name in ("pretrain_llama.sh", "pyproject.toml", "configs/tiny.yaml"):
        shutil.copy(ROOT / name, project / name)
    for name in ("scripts", "distca"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    calls = machine.folder / "calls"
    bare = f"""#!/bin/bash
{machine._launch}
if [[ $1 == - ]]; then exit 1; fi
if [[ $1 == -c ]]; then exit 0; fi
echo "$@" >> {calls}
if [[ $2 == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
if [[ $* == *"$FAIL"* && -n $FAIL ]]; then echo no such package; exit 1; fi
"""
    for name in ("python", "python3.11", "python3.12"):
        machine.tool(name, bare)
    dry = machine.run(script=project / "pretrain_llama.sh", DRY_RUN="1", STEPS="5")  # a mistake that is not seen
    assert dry.returncode == 0, dry.stderr
    assert "dependencies are missing" in dry.stderr and "--train.steps 5" in dry.stdout
    assert not calls.exists()
    assert not (project / ".venv").exists()
    result = machine.run(script=project / "pretrain_llama.sh")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[0].startswith("DistCA's dependencies are missing: installing them into")
    made, torch, rest, checked, started = calls.read_text().splitlines()
    assert made == f"-m venv {project}/.venv"
    assert torch.endswith("torch==2.13.0"), "torch comes first and by itself where there is no GPU"
    assert rest.endswith(f"-e {project}")
    assert checked.startswith(f"{project}/pretrain_llama.py --check 4 ")
    assert started.startswith("-m distca.cluster.torchrun --nproc-per-node=4")
    # With a GPU it is one step, and a failure says where to look.
    machine.gpus(1)
    failed = machine.run(script=project / "pretrain_llama.sh", FAIL="[gpu]", MODEL="tiny")
    assert failed.returncode == 2
    assert calls.read_text().splitlines()[-1].endswith(f"-e {project}[gpu]")
    assert "no such package" in failed.stderr
    assert "setup.log" in failed.stderr
