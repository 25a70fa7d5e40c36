"""Servers without a model on GPUs: losses are those of the homes alone, also when one is lost and another joins; and
servers of unlike speeds."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import server_kills, server_speeds
from benchmarks.server_kills_pool import Setup
from distca.testing.ranks import run_ranks
from megatron_patches.versions import has_gated_delta_net
from tests.gpu.runs import settings_line
from tests.gpu.starts import Case, Starts
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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")[:gpus]
    variables = {"GPUS_PER_NODE": str(gpus), "CUDA_VISIBLE_DEVICES": ",".join(visible)}
    if servers:
        variables |= {"SERVERS": str(servers), "SERVERS_PER_GPU": str(per_gpu)}
    command = ["bash", str(ROOT / "pretrain_llama.sh"), *settings_line(own)]
    # The launcher takes what other tests read for misspelt settings.
    others = {name: value for name, value in os.environ.items() if not name.startswith("DISTCA_")}
    done = subprocess.run(command, env=others | variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return output / name


def _why_not(case: str) -> str | None:
    homes, servers, *_ = CASES[case]
    gpus = homes + servers // _per_gpu(case)
    if "gated delta nets" in case and find_spec("fla") is None:
        return "needs fla-core"
    if "gated delta nets" in case and not has_gated_delta_net():
        return "Gated delta nets are served with Megatron-Core 0.19"
    return f"needs {gpus} GPUs" if torch.cuda.device_count() < gpus else None


def _per_gpu(case: str) -> int:
    return CASES[case][1] if "one GPU" in case else 1


def _both(folder: Path, case: str) -> tuple[Path, Path]:
    """The folders of homes alone, and of homes and servers. A start takes longer than the steps, so both share GPUs."""
    homes, servers, settings, _ = CASES[case]
    with ThreadPoolExecutor() as pool:
        alone = pool.submit(_train, folder, "alone", homes, 0, settings | {"cad.transport": "nccl"})
        together = _train(folder, "together", homes, servers, settings, _per_gpu(case))
        return alone.result(), together


def cases(folder: Path) -> dict[str, Case]:
    return {
        case: Case(1, _both, (folder / str(number), case), "launches", limit_s=500, launches=2 * homes + servers)
        for number, (case, (homes, servers, *_)) in enumerate(CASES.items())
        if _why_not(case) is None
    }


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_homes_alone(starts: Starts, case: str) -> None:
    if reason := _why_not(case):
        pytest.skip(reason)
    homes, _, _, apart = CASES[case]
    ((alone, together),) = starts.result(case)
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
    measured = run_ranks(2, server_speeds.measure, setup, timeout=240, gpus=True)[0]
    assert not server_speeds.missed(server_speeds.compared(setup, measured), gpus=True)
