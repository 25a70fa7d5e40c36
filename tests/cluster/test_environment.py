"""What a launcher says and cannot mean is a sentence, within seconds, before ranks wait for each other."""

from __future__ import annotations

import time

import pytest

from distca.cluster import environment
from distca.cluster.environment import Launched, check_gpus_usable, gpu_of, launched
from distca.errors import LaunchError

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_process_on_its_own_and_one_of_several() -> None:
    assert launched({}) == launched({"SLURM_NTASKS": "1"}) == Launched()
    assert launched({"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == Launched()
    # A batch script, in which Slurm says how many tasks the node has room for.
    assert launched({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "64"}) == Launched()
    variables = MEETING | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURM_NTASKS": "4"}
    assert launched(variables) == Launched(3, 4, 1, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_NTASKS": "16"}, "Slurm has 16 tasks for this, but WORLD_SIZE is not set"),
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "3"}, "each would train a run of one rank"),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_JOB_ID": "7"}, "Slurm has 4 tasks for this"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "8"}, "Slurm has 8 tasks for this"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "8(x2),4"}, "Slurm has 20 tasks for this"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8"}, "Slurm has 8 tasks for this"),
        ({"SLURM_NPROCS": "8"}, "Slurm has 8 tasks for this"),
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"} | MEETING, "RANK is '2'; it must be a whole number from 0 to 1."),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is 'two'; it must be a whole number at least 1."),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (
            {"WORLD_SIZE": "2", "RANK": "0"} | MEETING | {"MASTER_PORT": "99999"},
            "MASTER_PORT is '99999'; it must be a whole number from 1 to 65535.",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0"} | MEETING | {"MASTER_ADDR": "no-such-node.invalid"},
            "MASTER_ADDR is 'no-such-node.invalid', and .* finds no node of that name",
        ),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(variables: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said) as refused:
        launched(variables)
    assert refused.value.next_step


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.socket, "getaddrinfo", lambda *_: time.sleep(3))
    monkeypatch.setattr(environment, "_RESOLVE_S", 0.2)
    with pytest.raises(LaunchError, match="no answer within"):
        launched({"WORLD_SIZE": "2", "RANK": "0"} | MEETING)


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_has_gpus", lambda: True)
    with pytest.raises(LaunchError, match=r"has GPUs, but torch 2.13.0\+cpu cannot use any"):
        check_gpus_usable(False, "2.13.0+cpu", {})
    check_gpus_usable(True, "2.13.0", {})
    check_gpus_usable(False, "2.13.0+cpu", {"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(environment, "_has_gpus", lambda: False)
    with pytest.raises(LaunchError, match=r"GPUS_PER_NODE is 8, but torch 2\.13\.0 cannot use any"):
        check_gpus_usable(False, "2.13.0", {"GPUS_PER_NODE": "8"})
    check_gpus_usable(False, "2.13.0", {})
    check_gpus_usable(False, "2.13.0", {"GPUS_PER_NODE": "0"})


def test_a_rank_takes_its_own_gpu_or_the_only_one_that_it_sees() -> None:
    assert [gpu_of(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert gpu_of(3, 1) == 0, "one GPU per task, bound by Slurm"
    with pytest.raises(LaunchError, match=r"rank 2 of its node \(LOCAL_RANK\) and sees 2 GPUs"):
        gpu_of(2, 2)
