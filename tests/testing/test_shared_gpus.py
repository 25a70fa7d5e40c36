"""Ranks that outnumber GPUs share them, and NCCL takes each for a machine."""

import os

import pytest
import torch

from distca.errors import LaunchError
from distca.testing.shared_gpus import share_gpus


@pytest.mark.parametrize("ranks,gpus,expected", [(2, 2, [0, 1]), (2, 1, [0, 0]), (4, 2, [0, 1, 0, 1])])
def test_a_machine_each_only_where_they_share(
    ranks: int, gpus: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    hosts = []
    for rank, gpu in enumerate(expected):
        monkeypatch.setattr(os, "environ", {})
        assert share_gpus(rank, ranks) == gpu
        hosts.append(os.environ.get("NCCL_HOSTID"))
        assert ("NCCL_NET" in os.environ) == (ranks > gpus)
    assert len(set(hosts)) == (ranks if ranks > gpus else 1)


def test_without_gpus_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LaunchError, match="Rank 1 of 2 asks for a GPU, and torch finds none on this machine"):
        share_gpus(1, 2)
