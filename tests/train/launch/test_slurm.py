"""pretrain_llama.sh in a job of Slurm: nodes, GPUs and ranks from its variables; sentences where they say nothing."""

import shlex
import shutil
import subprocess
import sys

import pytest

from distca.errors import LaunchError
from distca.train.launch.machines import _asked_of_job, _gpus_of_job
from tests.train.launch.machine import ROOT, SCRIPT, Machine, has_pair


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
    said = machine.launch(SLURM_GPUS="7", DRY_RUN="1")
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
    result = machine.launch(DRY_RUN="1", **variables)
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
    assert machine.launch().stderr.startswith("error: scontrol does not name the job's machines.")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_GPUS_ON_NODE": "N/A"}, "SLURM_GPUS_ON_NODE is 'N/A', which names no number of GPUs."),
        ({"SLURM_GPUS_PER_NODE": "gres:gpu"}, "SLURM_GPUS_PER_NODE is 'gres:gpu', which names no number of GPUs."),
        ({"SLURM_GPUS_PER_NODE": "10000000000"}, "SLURM_GPUS_PER_NODE is '10000000000', which names no number"),
        ({"SLURM_JOB_NUM_NODES": "N/A"}, "SLURM_JOB_NUM_NODES is 'N/A'; it must be a whole number from 1 to"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES is 2, but SLURM_JOB_NODELIST host[1-1] names 1 machine."),
        ({"SLURM_STEP_NUM_TASKS": "N/A"}, "SLURM_STEP_NUM_TASKS is 'N/A'"),
        ({"SLURM_JOB_ID": "20017_1"}, "SLURM_JOB_ID is '20017_1'"),
    ],
)
def test_what_slurm_says_and_cannot_be_used_is_a_sentence(
    machine: Machine, variables: dict[str, str], said: str
) -> None:
    machine.slurm(1, None, **variables)
    result = machine.launch()
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {said}")
    assert len(result.stderr.splitlines()) == 2
    assert not machine.record.exists()


def test_a_slurm_job_that_lists_no_machines_is_a_sentence(machine: Machine) -> None:
    machine.slurm(1, 2)
    del machine.variables["SLURM_JOB_NODELIST"]
    result = machine.launch()
    assert result.returncode == 2
    assert result.stderr.startswith("error: This is a Slurm job, but SLURM_JOB_NODELIST does not name its machines.")
    assert len(result.stderr.splitlines()) == 2


def test_without_their_number_a_job_has_the_machines_that_its_list_names(machine: Machine) -> None:
    machine.slurm(2, 2)
    del machine.variables["SLURM_JOB_NUM_NODES"]
    assert "--nodes=2" in machine.dry()


def test_a_requeued_job_goes_on_with_what_it_saved(machine: Machine) -> None:
    machine.slurm(1, 2)
    assert not has_pair(machine.dry(SLURM_RESTART_COUNT="0"), "--checkpoint.resume", "job")
    assert has_pair(machine.dry(SLURM_RESTART_COUNT="1"), "--checkpoint.resume", "job")
    assert has_pair(machine.dry(SLURM_RESTART_COUNT="1", NAME="a"), "--checkpoint.resume", "auto")
    assert has_pair(machine.dry(SLURM_RESTART_COUNT="1", RESUME="latest"), "--checkpoint.resume", "latest")
    header = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=B:USR1@300", "--open-mode=append"} <= set(header)


def test_a_requeued_job_resumes_as_its_configuration_says(machine: Machine) -> None:
    machine.slurm(1, 2)
    machine.checks_settings()
    settings = machine.folder / "a.yaml"
    for resume, added, said in (
        ("latest", False, "resumes as its configuration says: checkpoint.resume latest."),
        ("null", True, "goes on with what it saved: checkpoint.resume job."),
    ):
        settings.write_text(f"checkpoint: {{resume: {resume}}}\n")
        launched = machine.launch(SLURM_RESTART_COUNT="1", CONFIG=str(settings), DRY_RUN="1", PYTHONPATH=str(ROOT))
        assert ("--checkpoint.resume job" in launched.stdout, launched.stderr) == (
            added,
            f"Slurm starts this job again, which {said}\n",
        )


def test_servers_are_a_step_of_their_own_on_the_last_nodes(machine: Machine) -> None:
    machine.slurm(3, 8)
    said = machine.launch(SERVERS="8", DRY_RUN="1")
    assert said.returncode == 0, said.stderr
    homes, servers = map(shlex.split, said.stdout.splitlines())
    assert {"--nodes=2", "--ntasks=16", "--relative=0", "WORLD_SIZE=16", "POOL_NODES=3"} <= set(homes)
    assert {"--nodes=1", "--ntasks=8", "--relative=2", "MASTER_ADDR=host1", "POOL_NODES=3"} <= set(servers)
    assert has_pair(homes, "--cad.servers", "8")
    refused = machine.launch(SERVERS="4", DRY_RUN="1")
    assert refused.returncode == 2
    assert "SERVERS is 4, but of several machines servers without a model fill whole ones, of 8 each." in refused.stderr
    shared = machine.launch(SERVERS="16", SERVERS_PER_GPU="2", DRY_RUN="1").stdout.splitlines()
    homes, servers = map(shlex.split, shared)
    assert "--ntasks=16" in homes and {"--nodes=1", "--ntasks-per-node=16", "--relative=2"} <= set(servers)


def _server_and_gpu(machine: Machine, command: list[str], task: int) -> list[str]:
    """The numbers of a server and of its GPU, in a task of srun's ``command`` on one node."""
    shell = command[command.index("bash") : command.index("python")]
    variables = machine.variables | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
    shown = subprocess.run(
        [*shell, sys.executable, "-c", "import os; print(os.environ['SERVER'], os.environ['LOCAL_RANK'])"],
        env=variables | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return shown.stdout.split()


def test_servers_take_the_last_gpus_of_one_node(machine: Machine) -> None:
    machine.slurm(1, 8)
    homes, servers = map(shlex.split, machine.launch(SERVERS="2", DRY_RUN="1").stdout.splitlines())
    assert {"--ntasks=6", "--overlap"} <= set(homes)
    assert {"--ntasks=2", "--overlap", "--kill-on-bad-exit=0"} <= set(servers) and "--kill-on-bad-exit=1" in homes
    assert _server_and_gpu(machine, servers, 1) == ["1", "7"]
    shared = machine.launch(SERVERS="3", SERVERS_PER_GPU="2", DRY_RUN="1").stdout.splitlines()
    homes, servers = map(shlex.split, shared)
    assert "--ntasks=6" in homes and "--ntasks=3" in servers
    assert [_server_and_gpu(machine, servers, each)[1] for each in range(3)] == ["6", "6", "7"]
    refused = machine.launch(SERVERS="8", DRY_RUN="1")
    assert (refused.returncode, "leave none for ranks with a model" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "h100:8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:4"}, 6),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_GPUS_PER_NODE": "h100:4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_GPUS": "8"}, 4),
    ],
)
def test_gpus_of_all_types_count_and_0_says_nothing_of_the_job(said: dict[str, str], gpus: int) -> None:
    assert _gpus_of_job(said, 2) == gpus


@pytest.mark.parametrize(
    ("has", "refused"), [("h100:2", True), ("h100:4", False), ("0", False), ("a100:2,h100:2", False)]
)
def test_more_gpus_than_the_job_has_are_refused_where_slurm_counts_them(has: str, refused: bool) -> None:
    values, said = {"GPUS_PER_NODE": "4"}, {"SLURM_GPUS_ON_NODE": has}
    if refused:
        with pytest.raises(LaunchError, match="GPUS_PER_NODE is 4, but the Slurm job has 2 GPUs on a machine"):
            _asked_of_job(values, said)
    else:
        assert _asked_of_job(values, said) == 4
