"""pretrain_llama.sh on machines without Slurm: what it starts, what its variables do, and the mistakes it refuses."""

import pytest

from distca.train.config.cli import known_settings
from distca.train.launch.pretrain import extras
from tests.train.launch.machine import RECORDER, ROOT, Machine, has_pair


def test_cpu_machine_starts_four_ranks_of_the_tiny_run(machine: Machine) -> None:
    result = machine.run()
    assert result.returncode == 0, result.stderr
    recorded = machine.record.read_text().splitlines()
    assert recorded[:3] == ["torchrun", "--nproc-per-node=4", "--standalone"]
    assert recorded[3] == str(ROOT / "pretrain_llama.py")
    assert has_pair(recorded, "--config", str(ROOT / "configs" / "tiny.yaml"))
    assert "OMP_NUM_THREADS=1" in recorded
    assert "4 CPU ranks" in result.stderr


def test_a_misspelled_variable_is_warned_of(machine: Machine) -> None:
    result = machine.run(STEPZ="3", DRY_RUN="1")
    assert result.returncode == 0 and "--train.steps" not in result.stdout
    assert "warning: STEPZ is '3', which no script of DistCA reads. If you mean STEPS, rename it.\n" in result.stderr


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
    ("values", "words", "needed"),
    [
        ({}, "", ""),
        ({"INIT_FROM": "folder"}, "", "models"),
        ({}, "--checkpoint.init_from folder", "models"),
        ({}, "--checkpoint.export=folder --data.tokenizer bytes", "models"),
        ({"DATA_SOURCE": "parquet"}, "", "data"),
        ({"DATA_SOURCE": "jsonl"}, "--data.tokenizer tokenizer.json", "data"),
        ({"DATA_SOURCE": "jsonl"}, "--data.tokenizer=bytes --train.steps 3", ""),
        ({"INIT_FROM": "folder"}, "--data.source blend", "models,data"),
    ],
)
def test_packages_that_a_run_needs_are_installed_with_it(values: dict[str, str], words: str, needed: str) -> None:
    assert extras(values, words.split()) == needed


@pytest.mark.parametrize(
    ("visible", "ranks"),
    [("0, 1", 2), ("3", 1), ("0,1,2,3", 4), ("1,9,2", 1), ("GPU-8932f937,GPU-d1", 2), ("", 4), ("NoDevFiles", 4)],
)
def test_only_visible_gpus_count(machine: Machine, visible: str, ranks: int) -> None:
    """None at all are four CPU ranks."""
    machine.gpus(4)
    command = machine.dry(CUDA_VISIBLE_DEVICES=visible, MODEL="tiny")
    assert f"--nproc-per-node={ranks}" in command
    assert ("CUDA_VISIBLE_DEVICES=" in command) == (visible in ("", "NoDevFiles"))


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


def test_machines_without_slurm(machine: Machine) -> None:
    machine.gpus(8)
    command = machine.dry(NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500"} <= set(command)
    assert "--standalone" not in command


def test_servers_may_share_gpus(machine: Machine) -> None:
    machine.gpus(5)
    command = machine.dry(SERVERS="4", SERVERS_PER_GPU="2", TP_SIZE="2", GPUS_PER_NODE="4")
    at = command.index("distca.cluster.server_processes")
    assert "--nproc-per-node=2" in command and command[at + 1 : at + 5] == ["0", "4", "2", "2"]
    for variables in ({"SERVERS_PER_GPU": "2"}, {"SERVERS": "2", "SERVERS_PER_GPU": "2", "GPUS_PER_NODE": "0"}):
        refused = machine.launch(DRY_RUN="1", **variables)
        assert refused.returncode == 2 and "unset SERVERS_PER_GPU" in refused.stderr


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
        ({"NNODES": "1", "NODE_RANK": "1"}, "NODE_RANK is 1, but NNODES is 1; numbers start at 0."),
        ({"NODE_RANK": "1", "MASTER_ADDR": "a"}, "NODE_RANK is 1, but NNODES is 1; numbers start at 0."),
        ({"GPUS_PER_NODE": "1"}, "GPUS_PER_NODE is 1, but this machine has 0 GPUs."),
        ({"ENABLE_NSYS": "1"}, "nsys is not on PATH"),
        ({"MODEL": "tiny", "CONFIG": "configs/tiny.yaml"}, "MODEL and CONFIG are both set"),
        ({"MODEL": "tiny", "INIT_FROM": "folder"}, "MODEL and INIT_FROM are both given"),
        ({"CONFIG": "nowhere.yaml"}, "There is no configuration file nowhere.yaml."),
    ],
)
def test_mistakes_are_one_sentence(machine: Machine, variables: dict[str, str], said: str) -> None:
    result = machine.launch(**variables)
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
    result = machine.launch("--train.steps=4", STEPS="3")
    assert (result.returncode, "STEPS and --train.steps are both given" in result.stderr) == (2, True)
    result = machine.launch(CAD="0", PING_PONG="1")
    assert (result.returncode, "PING_PONG is 1, but CAD is 0" in result.stderr) == (2, True)
    machine.slurm(2, 8)
    result = machine.launch(NNODES="4")
    assert (result.returncode, "NNODES is 4, but the Slurm job has 2 nodes." in result.stderr) == (2, True)
    result = machine.launch(NODE_RANK="1")
    assert (result.returncode, "NODE_RANK is 1, but Slurm numbers the machines" in result.stderr) == (2, True)
    result = machine.launch(GPUS_PER_NODE="16")
    assert (result.returncode, "but the Slurm job has 8 GPUs on a machine." in result.stderr) == (2, True)
    assert "--ntasks-per-node=4" in machine.dry(GPUS_PER_NODE="4")
    result = machine.launch(SLURM_STEP_NUM_TASKS="16")
    assert (result.returncode, "it starts the ranks itself" in result.stderr) == (2, True)
