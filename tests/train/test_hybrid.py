"""Runs of hybrid stacks, from settings to metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distca.models.hybrid import Hybrid
from distca.models.shape import ModelShape
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.config.validate import validate
from distca.train.metrics.flops import model_flops
from distca.train.run.memory import predict_memory
from megatron_patches.versions import has_gated_delta_net
from tests.train.small_runs import LONGEST, arguments, steps_of, train_all, write_texts

SMALL = {
    "model__layers": 4,
    "model__hybrid__pattern": "G-*-",
    "model__hybrid__key_heads": 2,
    "model__hybrid__value_heads": 4,
    "model__hybrid__key_dim": 8,
    "model__hybrid__value_dim": 8,
}

STEPS = 3


def _config(**changed: object) -> object:
    return parse_run_config(arguments(**SMALL | changed))


@pytest.mark.slow
@pytest.mark.skipif(not has_gated_delta_net(), reason="HybridModel's layers have been there since Megatron-Core 0.19")
def test_runs_train_and_go_on_with_tensor_parallel_ranks_or_in_stages(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    whole_documents = {"cad__enabled": False}
    both = {"output": tmp_path, "data__path": texts, "train__steps": STEPS}
    gates = {"model__hybrid__output_gate": True, "model__qk_norm": True}
    delta = arguments(**SMALL | both | gates, name="delta", log__timeline_steps="[2,3]")
    mamba = arguments(**SMALL | both | {"model__hybrid__pattern": "M*"}, name="mamba", train__recompute="all")
    home = arguments(**SMALL | both | gates | whole_documents, name="home")
    cut = [*delta, "--name", "cut", "--train.time_limit", "1e-6"]
    same_batch = ["--parallel.tp", "2", "--data.tokens_per_rank", str(2 * LONGEST)]
    goes_on = [*delta, "--name", "cut", "--checkpoint.resume", "latest", *same_batch]
    cut_mamba = [*mamba, "--name", "cut_mamba", "--train.time_limit", "1e-6"]
    in_stages = [*cut_mamba[:-2], "--checkpoint.resume", "latest", "--parallel.pp", "2", *same_batch[2:]]
    runs = [delta, mamba, home, cut, goes_on, cut_mamba, in_stages]
    whole, others, packed, _, resumed, _, staged = (Path(each) for each in run_ranks(2, train_all, runs)[0])
    assert steps_of(packed)[STEPS] < steps_of(packed)[1]
    assert min(steps_of(others).values()) == steps_of(others)[STEPS] < steps_of(others)[1]
    for expected, found in ((steps_of(whole), steps_of(resumed)), (steps_of(others), steps_of(staged))):
        assert found.keys() <= expected.keys() and STEPS in found
        assert all(found[step] == pytest.approx(expected[step], rel=1e-5) for step in found)
    check_bytes(whole)


def check_bytes(run: Path) -> None:
    """Bytes of attention and of recurrent layers are those that the ranks' timelines have."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] > 0
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    sent = {"bytes_moved": 0, "recurrent_bytes_moved": 0}
    for event in events:
        if event["ph"] == "X" and event["cat"].startswith("transfers"):
            recurrent = event["name"].split()[0] in ("halo", "states", "dstates", "dhalo")
            sent["recurrent_bytes_moved" if recurrent else "bytes_moved"] += event["args"]["bytes sent"]
    assert sent == {name: sum(line[name] for line in lines[1:3]) for name in sent}
    assert min(sent.values()) > 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model__hybrid__pattern": "G-X-"}, "with 'X', which is not served"),
        ({"model__hybrid__pattern": "G-G-"}, "without attention"),
        ({"model__hybrid__pattern": "G-*-M-"}, "of which the 4 layers are no multiple"),
        ({"model__hybrid__pattern": "G*-M"}, "which would share their widths"),
        ({"model__hybrid__pattern": "*--G"}, "each MLP or layer with experts follows a mixer"),
        ({"model__hybrid__pattern": "G-*E"}, "model.experts.count is 0"),
        ({"model__hybrid__value_heads": 3}, "value_heads is 3, no multiple of key_heads 2"),
        ({"model__hybrid__key_heads": 0}, "key_heads is 0"),
        ({"model__hybrid__pattern": None}, "pattern is empty"),
        ({"parallel__pp": 2}, "which gives the 2 stages of parallel.pp unlike layers (G- and *-)"),
        ({"parallel__pp": 2, "cad__enabled": False}, "parallel.pp is 2, which is not served with model.hybrid.pattern"),
        ({"parallel__tp": 4}, "model.hybrid.key_heads 2 is not divisible by parallel.tp 4"),
        ({"model__variant__parallel_mlp": True}, "model.variant has more than"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(Exception, match="hybrid") as refused:
        validate(_config(**changed), 4)
    assert said in str(refused.value)


def test_a_published_model_has_its_parameters_its_flops_and_its_memory() -> None:
    config = parse_run_config(["--config", "configs/qwen3.5-9b-like-cut.yaml"])
    model = config.model
    assert [kind.recurrent for kind in model.layer_kinds] == ["G", "G", "G", "", "G", "G", "G", ""][:4]
    net = 4096 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 4096
    attention = 4096 * (2 * 16 * 256 + 2 * 4 * 256) + 16 * 256 * 4096
    assert model.matmul_weights == 3 * net + attention + 4 * 3 * 4096 * 12288
    flops = model_flops(model, 32000, [1000, 10])
    assert flops.attention == 12 * 16 * 256 * (1000 * 1001 // 2 + 55)
    assert flops.recurrent == 3 * 3 * (6 * 32 * 128 * 128 + 2 * 4 * 8192) * 1010
    (stage,) = predict_memory(config, 2, 32000)
    assert 40 < stage.total / 2**30 < 80


def test_a_layer_with_a_recurrent_core_keeps_less_with_fewer_channels() -> None:
    shape = ModelShape(
        layers=2, hidden=64, ffn=64, heads=4, kv_heads=2, hybrid=Hybrid(pattern="M*", key_heads=2, value_heads=4)
    )
    assert [kind.mlp.ffn for kind in shape.layer_kinds] == [0, 0]
    assert shape.matmul_weights == 64 * (2 * 256 + 2 * 512 + 4) + 512 * 64 + 64 * (64 + 2 * 32) + 64 * 64
