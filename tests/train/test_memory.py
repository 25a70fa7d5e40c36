"""Predicted memory, against what was measured on H200s and against what cannot be."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from distca.train.config import parse_run_config
from distca.train.memory import GIB, StageMemory, check_memory, describe, predict_memory
from distca.train.settings import ConfigError, RunConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MODES = {"off": ["--cad.enabled", "false"], "on": []}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["training_8b_cut_64k", "pipeline_8b_cut_64k"])
def test_measured_peaks_are_predicted(name: str, mode: str) -> None:
    report = json.loads((RESULTS / f"{name}.json").read_text())
    # Recorded when recomputation was still on or off.
    words = shlex.split(report["command"].replace("--train.recompute false", "--train.recompute none"))
    config = parse_run_config([*words[words.index("--") + 1 :], *MODES[mode]])
    ranks = int(report["hardware"].split()[0])
    stages = predict_memory(config, ranks, config.model.vocabulary)
    measured = report["modes"][mode]["peak_memory_gb"]["mean"]
    predicted = max(stage.total for stage in stages) + _kept_when_recorded(config, stages, mode)
    assert predicted / GIB == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("mode", ["packed", "distca"])
def test_measured_peaks_with_128k_tokens_are_predicted(mode: str) -> None:
    report = json.loads((RESULTS / "throughput_2_gpus_pretrain_128k.json").read_text())
    words = shlex.split(report["command"])
    settings = ["--cad.enabled", str(mode == "distca").lower()]
    config = parse_run_config([*words[words.index("--") + 1 :], *settings])
    (cell,) = report["cells"].values()
    # The benchmark counts NVSHMEM's memory, which is not torch's.
    heap = config.resolved_nvshmem_buffer_gb if mode == "distca" else 0.0
    (stage,) = predict_memory(config, int(report["hardware"].split()[0]), config.model.vocabulary)
    assert stage.total / GIB + heap == pytest.approx(cell["modes"][mode]["memory_gib"]["max"], rel=0.04)


def _kept_when_recorded(config: RunConfig, stages: list[StageMemory], mode: str) -> int:
    """Bytes that layers kept then and no longer do: SwiGLU's output, but for the layer (or half of it) that is at work,
    the norms' outputs, which attention at home still keeps, and there the whole QKV projection, for v, and o twice."""
    model, rows = config.model, config.data.tokens_per_rank
    tokens = max(stage.micro_batches for stage in stages) * model.layers // config.parallel.pp * rows
    if mode == "on":
        return 2 * (model.ffn + 2 * model.hidden) * (tokens - rows // 2)
    heads = 2 * model.heads + model.kv_heads
    return 2 * model.ffn * (tokens - rows) + 2 * heads * model.resolved_head_dim * tokens


def _predicted(*settings: str, ranks: int = 8) -> list[float]:
    config = parse_run_config(["--config", "configs/llama-8b-cut.yaml", "--model.layers", "8", *settings])
    return [stage.total / GIB for stage in predict_memory(config, ranks, 32000)]


def test_settings_that_save_memory_are_predicted_to() -> None:
    plain = ["--train.micro_batches", "8", "--parallel.pp", "4", "--train.recompute", "none"]
    worst = max(_predicted(*plain))
    recomputed = {level: max(_predicted(*plain, "--train.recompute", level)) for level in ("mlp", "all")}
    assert recomputed["all"] < recomputed["mlp"] < 0.6 * worst and recomputed["all"] < 0.51 * worst
    at_home = [*plain, "--cad.enabled", "false"]
    assert max(_predicted(*at_home, "--train.recompute", "mlp")) < 0.7 * max(_predicted(*at_home))
    assert max(_predicted(*plain, "--parallel.tp", "2")) < 0.6 * worst
    assert max(_predicted(*plain, "--data.tokens_per_rank", "32768")) < 0.7 * worst
    assert max(_predicted(*plain, "--cad.enabled", "false")) < worst, "1F1B holds fewer micro-batches"
    assert max(_predicted(*plain, "--optimizer.distributed", "false")) > worst
    assert max(_predicted(*plain, ranks=16)) < worst, "more ranks share the optimizer's state"


def test_micro_batches_in_flight_by_stage() -> None:
    def in_flight(micro_batches: int, *settings: str) -> list[int]:
        config = parse_run_config(
            ["--parallel.pp", "4", "--train.micro_batches", str(micro_batches), "--model.layers", "4", *settings]
        )
        return [stage.micro_batches for stage in predict_memory(config, 4, 256)]

    assert in_flight(8) == [7, 5, 3, 1]
    assert in_flight(4) == [4, 4, 3, 1]
    assert in_flight(8, "--cad.enabled", "false") == [4, 3, 2, 1]
    assert in_flight(1) == [1, 1, 1, 1]


def test_what_does_not_fit_is_refused_with_what_to_change() -> None:
    config = parse_run_config(["--config", "configs/llama-8b-cut.yaml", "--train.recompute", "none"])
    stages = predict_memory(config, 2, 32000)
    need = stages[0].total
    check_memory(config, stages, need)
    check_memory(config, stages, int(need / 1.09))
    with pytest.raises(ConfigError, match=r"need about \d+ GiB of device memory, and the device has \d+") as refused:
        check_memory(config, stages, int(need / 1.2))
    for setting in ("train.recompute", "data.tokens_per_rank", "parallel.tp", "parallel.pp"):
        assert setting in str(refused.value)
    for recompute, cad, remedy in (("mlp", "true", "all"), ("mlp", "false", None), ("all", "true", None)):
        settings = ["--train.recompute", recompute, "--cad.enabled", cad]
        config = parse_run_config(["--config", "configs/llama-8b-cut.yaml", *settings])
        with pytest.raises(ConfigError) as refused:
            check_memory(config, predict_memory(config, 2, 32000), GIB)
        assert ("train.recompute" in str(refused.value)) == (remedy is not None), settings
        assert remedy is None or f"set train.recompute to {remedy};" in str(refused.value)
    (line,) = describe(stages)
    assert "activations of 1 micro-batch " in line and f": {need / GIB:.1f} GiB (" in line
