"""Runs of models with latent attention, from settings to metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distca.errors import ConfigError
from distca.models.latent import Latent
from distca.models.layer_bytes import LayerBytes, parameters_of_rank
from distca.models.rope import RopeScaling
from distca.simulate import MODELS
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.config.validate import validate
from distca.train.metrics.flops import model_flops
from distca.train.run.memory import predict_memory
from megatron_patches.versions import has_gated_delta_net
from tests.train.small_runs import LONGEST, arguments, steps_of, train_all, write_texts

SMALL = {
    "model__kv_heads": 4,
    "model__latent__kv_rank": 12,
    "model__latent__key_dim": 8,
    "model__latent__rotary_dim": 4,
    "model__latent__value_dim": 6,
}
EXPERTS = {
    "model__experts__count": 4,
    "model__experts__ffn": 16,
    "model__experts__dense_layers": 1,
    "model__experts__shared_ffn": 8,
    "model__experts__score": "sigmoid",
    "model__experts__bias": True,
}
STEPS = 3
YARN = {"kind": "yarn", "factor": 4, "original_length": 32}


@pytest.mark.slow
@pytest.mark.skipif(not has_gated_delta_net(), reason="Latent attention is served with Megatron-Core 0.19")
def test_runs_train_and_go_on_with_other_ranks(tmp_path: Path) -> None:
    """A checkpoint of two expert-parallel ranks goes on with two tensor-parallel ones."""
    both = SMALL | EXPERTS | {"output": tmp_path, "data__path": write_texts(tmp_path / "texts"), "train__steps": STEPS}
    low = both | {"model__latent__q_rank": 8, "model__latent__score_magnitude": 1.0, "parallel__ep": 2}
    low |= {f"model__rope_scaling__{name}": value for name, value in YARN.items()}
    whole, home = (arguments(**low, name="low"), arguments(**both, name="home", cad__enabled=False))
    cut = [*whole, "--name", "cut", "--train.time_limit", "1e-6"]
    same_batch = ["--parallel.tp", "2", "--data.tokens_per_rank", str(2 * LONGEST)]
    goes_on = [*whole, "--name", "cut", "--checkpoint.resume", "latest", *same_batch]
    staged = [*arguments(**both, name="staged"), "--parallel.pp", "2", *same_batch[2:]]
    runs = [whole, home, cut, goes_on, staged]
    first, packed, _, resumed, in_stages = (steps_of(Path(run)) for run in run_ranks(2, train_all, runs)[0])
    assert first[STEPS] < first[1] and packed[STEPS] < packed[1]
    assert STEPS in resumed and resumed == pytest.approx({step: first[step] for step in resumed}, rel=1e-5)
    assert in_stages[STEPS] < in_stages[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model__latent__kv_rank": 0}, "model.latent.key_dim is 8, but kv_rank is 0"),
        ({"model__latent__value_dim": 13}, "model.latent.value_dim is 13, but a key has 12"),
        ({"model__latent__rotary_dim": 3}, "model.latent.rotary_dim is 3, but rotary positions need an even one"),
        ({"model__latent__key_dim": 0}, "model.latent.key_dim is 0; it must be at least 1"),
        ({"model__kv_heads": 2}, "model.kv_heads is 2, but with model.latent every head has keys"),
        ({"model__head_dim": 8}, "model.head_dim is 8, but model.latent.key_dim and rotary_dim make it 12"),
        ({"model__qk_norm": True}, "model.qk_norm is true, which is not served with latent attention; set it to false"),
        ({"model__sinks": True}, "model.sinks is true, which is not served with latent attention"),
        ({"model__rope_scaling__kind": "linear", "model__rope_scaling__factor": 2}, "set it to none or yarn"),
        (
            {f"model__rope_scaling__{name}": value for name, value in (YARN | {"factor": 1}).items()}
            | {"model__rope_scaling__attention_factor": 2},
            "model.rope_scaling.attention_factor is 2, but factor is 1, with which latent attention multiplies queries",
        ),
        ({"model__variant__activation": "gelu"}, "model.variant is not that of a LLaMA"),
        ({"parallel__tp": 2, "parallel__sequence_parallel": False}, "parallel.sequence_parallel is false, which is"),
        ({"train__fp8": "current", "train__precision": "bf16"}, "train.fp8 is current, which is not served"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, Any], said: str) -> None:
    own = SMALL | {"data__source": "stdlib"}
    validate(parse_run_config(arguments(**own)), 2)
    validate(parse_run_config(arguments(**own, cad__servers=2)), 2)
    with pytest.raises(ConfigError) as refused:
        validate(parse_run_config(arguments(**own | changed)), 2)
    assert said in str(refused.value)


def test_published_models_have_their_parameters_their_flops_and_their_memory() -> None:
    """Moonlight has 16.0 billion parameters, of which a token uses 2.9; DeepSeek-V3 has 671 and 37.6."""
    config = parse_run_config(["--config", "configs/moonlight-16b-a3b-like.yaml"])
    validate(config, 8)
    moonlight, deepseek = config.model, MODELS["deepseek-v3"]
    assert moonlight.held_weights == MODELS["moonlight-16b-a3b"].held_weights
    for model, held, used in ((moonlight, 15.96e9, 2.915e9), (deepseek, 671.0e9, 37.55e9)):
        tables = 2 * model.vocabulary * model.hidden
        assert model.held_weights + tables == pytest.approx(held, rel=1e-4)
        assert model.matmul_weights + tables == pytest.approx(used, rel=1e-3)
    inner = 2048 * (16 * 192 + 512 + 64) + 512 * 16 * 256
    assert moonlight.attention_weights == (inner, 16 * 128 * 2048)
    flops = model_flops(moonlight, moonlight.vocabulary, [1000, 10])
    assert flops.attention == 27 * 6 * 16 * (192 + 128) * (1000 * 1001 // 2 + 55)
    assert flops.linear == 6 * moonlight.matmul_weights * 1010
    [stage] = predict_memory(config, 8, moonlight.vocabulary)
    experts = 26 * 64 * 3 * 2048 * 1408
    assert stage.model.weights == pytest.approx(2 * (15.96e9 - experts + experts / 8), rel=1e-3)


def test_down_projections_are_whole_on_every_tensor_parallel_rank() -> None:
    model = replace(MODELS["deepseek-v3"], layers=3)
    [kind] = {*model.layer_kinds}
    layers = [LayerBytes(shape=model, kind=kind, tp=8)]
    replicated = 7168 * (1536 + 512 + 64)
    of_heads = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert layers[0].weights == replicated + (of_heads + 3 * 7168 * 18432) // 8
    norms = 2 * 7168 + 1536 + 512
    assert parameters_of_rank(model, layers, 129_280, False, False) == layers[0].weights + norms


def test_scores_have_the_square_of_yarns_magnitude() -> None:
    model = replace(MODELS["deepseek-v3"], latent=Latent(kv_rank=512, score_magnitude=1.0))
    assert model.softmax_scale == pytest.approx(192**-0.5)
    stretched = replace(model, rope_scaling=RopeScaling(kind="yarn", factor=40, original_length=4096))
    assert stretched.softmax_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
