import pytest
import torch

from distca.device.memory import outside_torch


def test_what_is_neither_free_nor_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 33)
    assert outside_torch(torch.device("cuda", 0)) == 7
