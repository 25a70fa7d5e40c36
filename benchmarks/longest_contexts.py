"""Figures of docs/memory.md that the trainer predicts for the whole 8B on two GPUs: ``python -m benchmarks.tables``."""

from __future__ import annotations

from benchmarks.tables import ROOT, rows
from distca.errors import ConfigError
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import RunConfig
from distca.train.run.memory import GIB, predict_memory
from distca.train.run.memory_fit import HostMemory, check_memory, host_memory_of_a_rank

GPUS, VOCABULARY, H200 = 2, 128_256, int(139.8 * GIB)
STEP = 16
"""Contexts are whole multiples of so many K tokens."""
OFFLOADED = "--train.offload all --cad.backward resend"
WAYS = {
    "longest context without `train.offload`": "--train.offload none --cad.backward resend",
    "with it": OFFLOADED,
    "attention at home, whole layers recomputed": "--train.offload none --cad.enabled false --cad.transport nccl",
}


def table() -> str:
    """The longest contexts that the trainer lets through, with host memory that all ranks need."""
    *beside, at_home = WAYS
    lines = [["", *beside, "host memory of the node with it", at_home], ["---"] * 5]
    for name, tp, by in (("2 data-parallel ranks", 1, ", by context parallelism"), ("`parallel.tp 2`", 2, "")):
        without, offloaded, home = (longest(tp, words) for words in WAYS.values())
        host = GPUS * host_memory_of_a_rank(run_of(offloaded, tp, OFFLOADED), GPUS, VOCABULARY) / GIB
        lines.append([name, f"{without:,}K", f"{offloaded:,}K", f"{host:,.0f} GiB", f"{home:,}K{by}"])
    return rows(*lines)


def longest(tp: int, words: str) -> int:
    """The longest context that fits, in K tokens, of documents as long as all tokens of a batch."""
    fits, refused = 0, 1 << 12  # in steps
    while refused - fits > 1:
        middle = (fits + refused) // 2
        try:
            check_memory(run_of(middle * STEP, tp, words), GPUS, VOCABULARY, H200, HostMemory(GPUS, 0))
            fits = middle
        except ConfigError:
            refused = middle
    return fits * STEP


def run_of(context: int, tp: int, words: str) -> RunConfig:
    tokens = context * 1024
    return configured(
        f"{words} --data.context_length {tokens} --data.tokens_per_rank {tokens * tp // GPUS} --parallel.tp {tp}"
    )


def configured(words: str) -> RunConfig:
    config = ROOT / "configs" / "llama-8b-2-gpus.yaml"
    return parse_run_config(["--config", str(config), "--train.recompute", "all", *words.split()])


def gib() -> str:
    """GiB of torch's memory on a rank, in FP8."""
    return _gib("false")


def gib_of_fp8_weights() -> str:
    return _gib("true")


def _gib(fp8_weights: str) -> str:
    words = f"--train.fp8 current --train.fp8_weights {fp8_weights} --cad.backward resend"
    (stage,) = predict_memory(configured(words), GPUS, VOCABULARY)
    return f"{stage.total / GIB:.0f}"
