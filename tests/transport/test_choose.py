"""What speaks against NVSHMEM is said in a sentence, the same on every rank, and rows go another way."""

import pytest
import torch
import torch.distributed as dist

from distca.commands.doctor_transport import transport_rows
from distca.testing.ranks import run_ranks
from distca.transport import choose, native


def _why_not(machines):
    """As if every rank had a GPU and NVSHMEM, on these machines."""
    rank = dist.get_rank()
    choose.why_not_nvshmem = lambda: None
    choose._machine = lambda: machines[rank]
    choose._gpu = lambda index: f"GPU {rank}"
    torch.cuda.current_device = torch.cuda.device_count = lambda: 0
    dist.get_backend = lambda group: "nccl"
    return choose.why_not_nvshmem_together(dist.group.WORLD)


def test_ranks_on_several_machines_are_told_why_they_use_nccl():
    said = (
        "the server pool spans 2 machines, and between machines rows go by NCCL, because the NVSHMEM transport writes "
        "through memory that peers map, which only GPUs of one machine do"
    )
    assert run_ranks(2, _why_not, ["one", "two"]) == [said, said]
    assert run_ranks(2, _why_not, ["one", "one"]) == [None, None]


def test_doctor_says_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for finding in ("_driver", "_peer_access", "_nvlink"):
        monkeypatch.setattr(f"distca.commands.doctor_transport.{finding}", str)
    monkeypatch.setattr(native, "why_not", lambda: None)
    assert dict(transport_rows())["several machines"].startswith(choose.ONE_MACHINE)


class _Library:
    def __init__(self, can_signal):
        self.distca_can_signal = lambda: can_signal


@pytest.mark.parametrize("can_signal", [0, 1])
def test_a_gpu_whose_streams_cannot_signal_is_refused(monkeypatch, can_signal):
    monkeypatch.setattr(native, "why_not", lambda: None)
    monkeypatch.setattr(native, "_library", lambda: _Library(can_signal))
    monkeypatch.setattr(native, "why_no_signals", native.why_no_signals.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = "streams of this GPU, under this driver, cannot write and wait for 64-bit words in memory"
    assert (native.why_no_signals() == said) == (choose.why_not_nvshmem() == said) == (can_signal == 0)
