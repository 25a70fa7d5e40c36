"""Servers without a model on GPUs: losses are those of the homes alone, also when one is lost and another joins; and
servers of unlike speeds."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import server_kills, server_speeds
from benchmarks.server_kills_pool import Setup
from distca.testing.ranks import run_ranks
from megatron_patches.versions import has_gated_delta_net
from tests.gpu.runs import settings_line
from tests.train.small_runs import ROOT, steps_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NET = {"pattern": "G-*-", "key_heads": 4, "value_heads": 8, "key_dim": 64, "value_dim": 64}
CASES: dict[str, tuple[int, int, dict[str, Any], float]] = {
    "1 + 1": (1, 1, {}, 2e-3),
    "1 + 1, float32": (1, 1, {"train.precision": "fp32"}, 1e-5),
    "1 + 1, resend": (1, 1, {"cad.backward": "resend"}, 2e-3),
    "3 + 1": (3, 1, {}, 2e-3),
    "2 + 2, stages": (2, 2, {"parallel.pp": 2}, 2e-3),
    "2 + 2, TP": (2, 2, {"parallel.tp": 2}, 2e-3),
    "1 + 1, gated delta nets": (1, 1, {f"model.hybrid.{name}": value for name, value in NET.items()}, 2e-3),
    "2 + 2, TP, one GPU for both servers": (2, 2, {"parallel.tp": 2}, 2e-3),
}
"""Homes, servers, settings, and how far losses may be apart: bfloat16 rounds sums of gradients in another order."""


def _train(output: Path, name: str, homes: int, servers: int, settings: dict[str, Any], per_gpu: int = 1) -> Path:
    own = {"name": name, "output": output, "data.whole_documents": "false", "train.micro_batches": 2} | settings
    gpus = homes + servers // per_gpu
    variables = {"GPUS_PER_NODE": str(gpus), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    if servers:
        variables |= {"SERVERS": str(servers), "SERVERS_PER_GPU": str(per_gpu)}
    command = ["bash", str(ROOT / "pretrain_llama.sh"), *settings_line(own)]
    # The launcher takes DISTCA_RESULTS, which other tests read, for a misspelt setting.
    others = {name: value for name, value in os.environ.items() if name != "DISTCA_RESULTS"}
    done = subprocess.run(command, env=others | variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return output / name


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_homes_alone(tmp_path: Path, case: str) -> None:
    homes, servers, settings, apart = CASES[case]
    if "gated delta nets" in case:
        pytest.importorskip("fla", reason="needs fla-core")
        if not has_gated_delta_net():
            pytest.skip("Gated delta nets are served with Megatron-Core 0.19")
    per_gpu = servers if "one GPU" in case else 1
    if torch.cuda.device_count() < homes + servers // per_gpu:
        pytest.skip(f"needs {homes + servers // per_gpu} GPUs")
    with ThreadPoolExecutor() as pool:  # a start takes longer than the steps, so that both share GPUs
        first = pool.submit(_train, tmp_path, "alone", homes, 0, settings | {"cad.transport": "nccl"})
        together = _train(tmp_path, "together", homes, servers, settings, per_gpu)
        alone = first.result()
    expected = steps_of(alone)
    assert steps_of(together) == pytest.approx(expected, rel=apart)
    assert steps_of(together, "grad_norm") == pytest.approx(steps_of(alone, "grad_norm"), rel=20 * apart)
    served = [seconds[homes:] for seconds in steps_of(together, "attention_s").values()]  # type: ignore[index]
    assert all(min(seconds) > 0 for seconds in served), "servers had nothing to do"


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_run_goes_on_without_lost_servers_and_with_new_ones() -> None:
    """One is killed, the next one stopped, in one start."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    pool = Setup(homes=1, servers=1, gpus=True, sockets=True)
    assert not server_kills.missed(server_kills.compared(["killed", "stopped"], pool))


@pytest.mark.alone
def test_attention_is_levelled_to_what_speeds_allow() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    setup = server_speeds.Setup(ranks=2, gpus=True, steps=6, seed=1234)
    measured = run_ranks(2, server_speeds.measure, setup, timeout=140, gpus=True)[0]
    assert not server_speeds.missed(server_speeds.compared(setup, measured), gpus=True)
