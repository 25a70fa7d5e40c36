"""A script that logs Megatron's MoE metrics is told once that the log leaves out attached models."""

from __future__ import annotations

import sys

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from megatron_patches.experts import untracked


@pytest.mark.parametrize("newer", [True, False])
def test_megatrons_log_of_metrics_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, newer: bool
) -> None:
    monkeypatch.setattr(untracked.dist, "get_rank", lambda: 0)
    seen: list[str] = []
    if newer:
        logging = pytest.importorskip("megatron.core.transformer.moe.moe_logging")
        monkeypatch.setattr(logging.MoEMetricsTracker, "report", lambda *_, **__: seen.append("log"))
    else:
        monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.moe_logging", None)
        monkeypatch.setattr(moe_utils, untracked._LOGS, lambda *_, **__: seen.append("log"))
    untracked.warn_when_logged()
    untracked.warn_when_logged()
    for _ in range(2):
        if newer:
            moe_utils.track_moe_metrics(loss_scale=torch.ones(1), iteration=1)
        else:
            getattr(moe_utils, untracked._LOGS)()
    assert seen == ["log"] * 2
    (record,) = caplog.records
    assert "leaves out models that CAD attached" in record.getMessage()
