"""Settings that need GPUs are refused by the launcher where it is about to start CPU ranks, and only there."""

import pytest

from distca.errors import ConfigError
from distca.train.launch.check import check_words, read_check
from distca.train.launch.machines import Machines
from tests.train.launch.machine import Machine

NEED_GPUS = ("--train.precision", "bf16", "--train.fp8", "current")


@pytest.mark.parametrize("gpus", [0, 2])
def test_what_is_written_is_read(gpus: int) -> None:
    machines = Machines("torchrun", 2, gpus, 0, "", "")
    assert read_check([*check_words(machines), "--name", "cpu"]) == (
        machines.world_size,
        gpus == 0,
        ["--name", "cpu"],
    )
    assert read_check(["--name", "cpu"]) is None


@pytest.mark.parametrize("words", [[], ["x"], ["0"], ["-1"], ["4.0"], ["--name", "a"], ["1" * 5000]])
def test_a_check_needs_a_number_of_ranks(words: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"^--check is followed by '.*'; it needs the number of ranks, a whole number"
    ):
        read_check(["--check", *words])


def test_cpu_ranks_are_not_started_with_what_needs_gpus(machine: Machine) -> None:
    machine.checks_settings()
    for dry in ("0", "1"):
        result = machine.run(*NEED_GPUS, DRY_RUN=dry, GPUS_PER_NODE="0")
        assert result.returncode == 2
        assert result.stderr.startswith("error: train.fp8 is current, which needs GPUs, but the ranks run on CPUs;")
        assert len(result.stderr.splitlines()) == 2
    assert not machine.record.exists()


def test_a_login_node_without_gpus_starts_ranks_that_have_some(machine: Machine) -> None:
    machine.checks_settings()
    machine.slurm(2, 2)
    command = machine.dry(*NEED_GPUS, MODEL="8b-cut", CUDA_VISIBLE_DEVICES="")
    assert {"srun", "--ntasks=4"} <= set(command)
