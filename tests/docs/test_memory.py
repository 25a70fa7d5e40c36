"""docs/memory.md: its predicted contexts are what the trainer lets through."""

from __future__ import annotations

import re

import pytest

from distca.errors import ConfigError
from distca.train.config.cli import parse_run_config
from distca.train.run.memory import GIB, predict_memory
from distca.train.run.memory_fit import HostMemory, check_host_memory, check_memory
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
CONFIG = str(ROOT / "configs" / "llama-8b-2-gpus.yaml")
H200, VOCABULARY = int(139.8 * GIB), 128_256
WAYS = {
    "without": ["--train.offload", "none", "--cad.backward", "resend"],
    "with": ["--train.offload", "all", "--cad.backward", "resend"],
    "at home": ["--train.offload", "none", "--cad.enabled", "false"],
}


def _refusal(context: int, tp: int, way: str, host_gib: float) -> str:
    """Of a context of so many thousand tokens; nothing where it is let through."""
    settings = {
        "data.context_length": context * 1024,
        "data.tokens_per_rank": context * 1024 * tp // 2,
        "parallel.tp": tp,
        "train.recompute": "all",
    }
    line = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    config = parse_run_config(["--config", CONFIG, *line, *WAYS[way]])
    host = HostMemory(2, int(host_gib * GIB))
    try:
        check_memory(config, 2, VOCABULARY, H200, host)
        check_host_memory(config, 2, VOCABULARY, host)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("row, tp", [("2 data-parallel ranks", 1), ("`parallel.tp 2`", 2)])
def test_longest_contexts_of_the_whole_8b_on_two_gpus(row: str, tp: int) -> None:
    (found,) = re.findall(
        rf"^\| {re.escape(row)} \| ([\d,]+)K \| ([\d,]+)K \| ([\d,]+) GiB \| ([\d,]+)K", PAGE, re.MULTILINE
    )
    without, held, host, at_home = (int(number.replace(",", "")) for number in found)
    for way, longest in (("without", without), ("with", held), ("at home", at_home)):
        assert not _refusal(longest, tp, way, host / 0.94)
        assert "GiB of device memory" in _refusal(longest + 16, tp, way, 4 * host), (way, longest)
    assert "GiB of host memory" in _refusal(held, tp, "with", host)


@pytest.mark.parametrize(
    "fp8_weights, said", [("false", "Predicted are {} GiB"), ("true", "and {} with `train.fp8_weights true`")]
)
def test_memory_of_the_whole_8b_on_two_gpus(fp8_weights: str, said: str) -> None:
    settings = ["--train.fp8", "current", "--train.fp8_weights", fp8_weights, "--train.recompute", "all"]
    config = parse_run_config(["--config", CONFIG, *settings, "--cad.backward", "resend"])
    (stage,) = predict_memory(config, 2, VOCABULARY)
    assert said.format(round(stage.total / GIB)) in PAGE
