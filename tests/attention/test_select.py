"""Which kernel is taken, and that a slow one is warned of."""

import logging

import pytest
import torch

from distca.attention import AttentionSpec, choose_kernel, select
from distca.attention.pair import PairKernel
from distca.attention.reference import ReferenceKernel
from distca.attention.self_check import Verdict
from distca.errors import KernelError
from distca.plan.kinds import AttentionKind


def test_cpu_ranks_take_the_reference_kernel_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "distca.attention.select"):
        chosen = choose_kernel("auto", AttentionSpec(2, 1, 64, torch.float32, torch.device("cpu")))
    assert isinstance(chosen, ReferenceKernel)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_gpu_left_with_the_reference_kernel_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flash-attn-4 is not there, and torch's backward is not deterministic, but its forward is."""
    monkeypatch.setattr(select, "_installed", lambda module: False)
    monkeypatch.setattr(select, "check", lambda kernel, spec: Verdict())
    with caplog.at_level(logging.INFO, "distca.attention.select"):
        spec = AttentionSpec(2, 1, 64, torch.bfloat16, torch.device("cuda"), deterministic=True)
        chosen = choose_kernel("auto", spec)
    assert isinstance(chosen, PairKernel)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "Core attention kernel: torch+reference, which is slow (not flash4: flash-attn-4 is not installed; not torch: "
        "its backward is not deterministic)"
    )


def test_a_kernel_without_softcap_is_not_taken_for_it() -> None:
    spec = AttentionSpec(2, 1, 64, torch.bfloat16, torch.device("cuda"), kinds=(AttentionKind(0.1, softcap=50.0),))
    assert select.why_not("torch", spec) == "it has no softcap of scores"


def test_a_machine_on_which_the_reference_is_wrong_too_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "check", lambda kernel, spec: Verdict("o is far off"))
    with pytest.raises(KernelError, match=r"can run: .*reference: its self-check refuses it, as o is far off\. Run"):
        choose_kernel("auto", AttentionSpec(2, 1, 8, torch.float32, torch.device("cpu")))


def test_an_unknown_name_is_said_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(2, 1, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(KernelError, match=r"^`kernel` is 'flash5'; it can be auto, flash4, torch, reference\.$"):
        choose_kernel("flash5", spec)
    monkeypatch.setattr(select, "first_objection", lambda mine: mine or "on rank 1, `kernel` is 'flash5'")
    with pytest.raises(KernelError, match=r"^on rank 1, `kernel` is 'flash5'\.$"):
        choose_kernel("auto", spec)
