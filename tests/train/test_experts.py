"""Runs of models with experts, from settings to metrics."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from distca.errors import ConfigError, ModelError
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.config.initial import description_of
from distca.train.config.validate import validate
from distca.train.run.expert_nodes import nodes_warning
from distca.train.run.memory import predict_memory
from distca.train.run.memory_fit import GIB, HostMemory, check_memory, resolve
from tests.train.small_runs import StepByStep, arguments, steps_of, train_all, write_texts

SMALL = {
    "model__experts__count": 4,
    "model__experts__ffn": 16,
    "model__experts__dense_layers": 1,
    "model__experts__shared_ffn": 8,
    "model__experts__balance": 0.01,
    "parallel__ep": 2,
}
PUBLISHED = ["--config", "configs/qwen3-30b-a3b.yaml"]


def _train(line: list[str], more: list[list[str]]) -> tuple[list[str], list[float]]:
    """Lines of the log, and what an expert's weights add up to, of every expert of this rank before training."""
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    run = StepByStep(parse_run_config(line))
    [layer] = [layer for layer in run.trainer.model.module.decoder.layers if hasattr(layer.mlp, "experts")]
    sums = [float(each.linear_fc1.weight.sum()) for each in layer.mlp.experts.local_experts]
    run.close()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distca").addHandler(handler)
    train_all([line, *more])
    return heard, sums


@pytest.mark.slow
def test_a_run_with_experts_trains_and_says_how_they_are_loaded(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    own = SMALL | {"log__tensorboard": True, "train__steps": 3, "cad__ranks_per_node": 1}
    line = arguments(name="moe", output=tmp_path, data__path=tmp_path / "texts", **own)
    cut = [*line, "--name", "cut"]
    ended, goes_on = (
        [*cut, "--train.time_limit", "1e-6"],
        [*cut, "--parallel.ep", "1", "--checkpoint.resume", "latest"],
    )
    (said, first), (others, second) = run_ranks(2, _train, line, [ended, goes_on])
    assert len({*first, *second}) == 4, "experts of different ranks are drawn apart"
    warned = [each for each in said if "parallel.ep) are on 2 machines" in each]
    assert len(warned) == 2 and not any("parallel.ep) are on" in each for each in others)
    assert any("EP 2 (4 experts; a token uses" in each for each in said)
    steps = [json.loads(each) for each in (tmp_path / "moe" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]
    for step in steps:
        assert "expert_load_layer_1" not in step, "a dense layer"
        load = step["expert_load_layer_2"]
        assert len(load) == 4 and np.mean(load) == pytest.approx(1, abs=0.01)
        assert step["expert_load_max"] == step["expert_load_max_layer_2"] == pytest.approx(max(load), abs=0.01)
        assert 0 < step["router_entropy_layer_2"] == step["router_entropy"] <= np.log(4) + 1e-6
    whole, resumed = steps_of(tmp_path / "moe"), steps_of(tmp_path / "cut")
    assert resumed == pytest.approx(whole, rel=1e-6), "from two expert-parallel ranks to one"
    assert _tags(tmp_path / "moe") >= {"expert_load_max", "router_entropy", "expert_load_layer_2"}


def _tags(run: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    return {*tags["scalars"], *tags["histograms"]}


@pytest.mark.parametrize(
    "settings, world, said",
    [
        ({"parallel__ep": 3}, 3, "parallel.ep is 3, which does not divide the 4 experts of a layer"),
        ({}, 3, "parallel.ep is 2, which does not divide the 3 ranks"),
        ({"parallel__pp": 2}, 2, "parallel.ep is 2, which does not divide the 1 rank of a pipeline stage"),
        ({"model__experts": None, "parallel__ep": 2}, 2, "parallel.ep is 2, but the model has no experts"),
        ({"parallel__tp": 2, "parallel__sequence_parallel": False}, 2, "parallel.sequence_parallel is false with"),
        ({"parallel__tp": 2, "model__experts__shared_ffn": 9}, 2, "shared_ffn 9 is not divisible by parallel.tp 2"),
        ({"model__experts__topk": 5}, 2, "model.experts.topk is 5; it must be at least 1 and at most count"),
        ({"train__precision": "bf16", "train__fp8": "current"}, 2, "train.fp8 is current, but experts are computed in"),
        ({"train__offload": "all", "train__recompute": "all"}, 2, "train.offload is all, but what experts keep"),
        ({"model__variant__gated": False}, 2, "model.variant.gated is false, but experts have gates"),
        ({"model__variant__activation": "gelu"}, 2, "model.variant.activation is gelu, but experts are computed with"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], world: int, said: str) -> None:
    own = SMALL | settings
    if "model__experts" in settings:
        own = {name: value for name, value in own.items() if not name.startswith("model__experts")}
    with pytest.raises(ConfigError) as refused:
        validate(parse_run_config(arguments(data__source="stdlib", **own)), world)
    assert said in str(refused.value)
    assert "settings cannot work" not in str(refused.value), "and nothing else"


def test_an_export_without_a_folder_of_a_family_with_experts_is_refused() -> None:
    config = parse_run_config(arguments(data__source="stdlib", checkpoint__export="new", **SMALL))
    with pytest.raises(ModelError, match=r"experts, .* or a variant, and no folder of a family .* or leave out"):
        description_of(config, 256)


def test_experts_that_do_not_fit_are_refused_with_what_would() -> None:
    config = parse_run_config([*PUBLISHED, "--parallel.ep", "1", "--data.tokens_per_rank", "8192"])
    validate(config, 16)
    room = (141 * GIB, HostMemory(8, 1024 * GIB))
    with pytest.raises(ConfigError, match=r"raise parallel.ep \(1\), by which ranks share the 128 experts\.$"):
        check_memory(resolve(config, 16, 151_936, *room), 16, 151_936, *room)


def test_memory_of_the_published_model() -> None:
    """Of 30.5 billion parameters 29 are experts', of which each of eight ranks has an eighth."""
    config = parse_run_config([*PUBLISHED, "--train.recompute", "all"])
    validate(config, 64)
    [stage] = predict_memory(config, 64, 151_936)
    experts, others = 48 * 128 * 3 * 2048 * 768, 30.53e9 - 48 * 128 * 3 * 2048 * 768
    assert stage.model.weights == pytest.approx(2 * (experts / 8 + others), rel=2e-3)
    assert stage.model.optimizer == pytest.approx(12 * (experts / 8 / 8 + others / 64), rel=2e-3)


def test_a_warning_says_what_crosses_between_machines() -> None:
    config = parse_run_config(PUBLISHED)
    assert nodes_warning(config, ["a"] * 8 + ["b"] * 8) is None
    said = nodes_warning(config, ["a"] * 4 + ["b"] * 4)
    # 32,768 rows x 2,048 x 2 bytes x 48 layers x 4 exchanges, to 4 ranks, for each of which 66 % have an expert
    assert said is not None and "each sends about 68 GB" in said and "takes 1.4 s" in said
