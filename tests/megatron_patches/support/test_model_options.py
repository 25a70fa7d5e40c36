"""Model options that mean nothing, or that something else undoes, are refused with what to change."""

from types import SimpleNamespace

import pytest
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig

from distca.models.rope import RopeScaling
from megatron_patches.model.model_options import MEGATRONS, ModelOptions, QueryScaling, Rotary
from megatron_patches.support.model_options import check_model_options, check_own_rotary
from tests.megatron_patches.support.cases import LLAMA, refusal

ROTARY = Rotary(base=100.0)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (ModelOptions(), {}),
        (ModelOptions(norms="both", embedding_scale=3.0, score_softcap=50.0, final_softcap=30.0), {}),
        (ModelOptions(query_key_norm="width", norm_after_rotation=True), {"qk_layernorm": True}),
        (ModelOptions(rotations=(ROTARY, None)), {}),
        (ModelOptions(rotations=(None, None)), {"no_rope_freq": [0, 1]}),
        (ModelOptions(norm_bias=False, parallel_mlp=True), {"normalization": "LayerNorm"}),
    ],
)
def test_options_that_go_together(options, fields):
    assert refusal(check_model_options, options, TransformerConfig(**{**LLAMA, **fields})) is None


@pytest.mark.parametrize(
    ("options", "fields", "said"),
    [
        (ModelOptions(norms="behind"), {}, "`norms` is 'behind'; it can be pre, both, post."),
        (ModelOptions(query_key_norm="all"), {"qk_layernorm": True}, "`query_key_norm` is 'all'; it can be"),
        (ModelOptions(residual_multiplier=0.0), {}, "`residual_multiplier` is 0.0; it must be a number above 0."),
        (ModelOptions(logit_multiplier=float("nan")), {}, "`logit_multiplier` is nan; it must"),
        (ModelOptions(final_softcap=-1.0), {}, "`final_softcap` is -1.0; it must be a number from 0 on."),
        (ModelOptions(query_scaling=QueryScaling(beta=0.1, original_length=0)), {}, "`query_scaling` has beta 0.1 and"),
        (ModelOptions(query_key_norm="width"), {}, "`query_key_norm` is 'width', but qk_layernorm is False"),
        (ModelOptions(norm_after_rotation=True), {}, "`norm_after_rotation` is True, but qk_layernorm is False"),
        (
            ModelOptions(query_key_norm="width"),
            {"qk_layernorm": True, "normalization": "LayerNorm"},
            "`query_key_norm` is 'width', but normalization is 'LayerNorm'",
        ),
        (
            ModelOptions(norm_after_rotation=True, query_scaling=QueryScaling(beta=0.1, original_length=8)),
            {"qk_layernorm": True},
            "`query_scaling` multiplies queries, but norm_after_rotation undoes this",
        ),
        (ModelOptions(norm_bias=False), {}, "`norm_bias` is False, but normalization is 'RMSNorm'"),
        (ModelOptions(parallel_mlp=True, norms="post"), {}, "`parallel_mlp` is True, but `norms` is 'post'"),
        (
            ModelOptions(attention_output_bias=True),
            {"add_bias_linear": True},
            "`attention_output_bias` is True, but add_bias_linear gives",
        ),
        (ModelOptions(mlp_bias=True), {"add_bias_linear": True}, "`mlp_bias` is True, but add_bias_linear gives"),
        (
            ModelOptions(mlp_bias=True),
            {"num_moe_experts": 2},
            "`mlp_bias` is True, but it gives experts no biases",
        ),
        (ModelOptions(rotations=(None,)), {}, "`rotations` has 1 entries, but the model has 2 layers"),
        (
            ModelOptions(rotations=(None, ROTARY)),
            {"no_rope_freq": [0, 1]},
            "`rotations[1]` gives a layer rotary positions, but no_rope_freq[1] says that the layer has none",
        ),
        (
            ModelOptions(rotations=(Rotary(base=10.0, percent=0.4), None)),
            {},
            "`rotations[0]`: percent is 0.4; it must be at most 1 and rotate an even number of a head's 8 elements",
        ),
        (
            ModelOptions(rotations=(Rotary(base=10.0, scaling=RopeScaling(kind="yarn", factor=4.0)), None)),
            {},
            "`rotations[0]`: scaling.original_length is 0",
        ),
        (ModelOptions(rotations=(Rotary(base=0.0), None)), {}, "`rotations[0]`: base is 0.0; it must be"),
    ],
)
def test_options_that_are_refused(options, fields, said):
    config = TransformerConfig(**{**LLAMA, "add_bias_linear": False, **fields})
    assert (refusal(check_model_options, options, config) or "").startswith(said)


@pytest.mark.parametrize(
    ("rotations", "skipped", "built", "refused"),
    [
        ((ROTARY, ROTARY), None, {}, False),
        ((ROTARY, ROTARY), None, {"rotary_base": 500}, True),
        ((ROTARY, ROTARY), None, {"rotary_percent": 0.5}, True),
        ((ROTARY, ROTARY), None, {"seq_len_interpolation_factor": 2.0}, True),
        ((ROTARY, None), [0, 1], {"rotary_base": 500}, True),
        ((ROTARY, None), None, {"rotary_base": 500}, False),
        ((), [1, 1], {"rotary_base": 500}, True),
        ((), [1, 1], {}, False),
        ((), [1, 0], {"rotary_base": 500}, False),
        ((), None, {"rotary_base": 500}, False),
    ],
)
def test_rotary_positions_that_no_layer_has(rotations, skipped, built, refused):
    config = TransformerConfig(**LLAMA, no_rope_freq=skipped)
    options = {"rotary_percent": 1.0, **built}
    rotary = RotaryEmbedding(config.kv_channels, use_cpu_initialization=True, **options)
    model = SimpleNamespace(config=config, rotary_pos_emb=rotary)
    said = refusal(check_own_rotary, model, ModelOptions(rotations=rotations)) or ""
    assert said.startswith("GPTModel was built with rotary positions that no layer would use") == refused
    assert all(argument in said for argument in built) or not refused


def test_what_megatrons_own_layers_compute_too():
    assert not MEGATRONS.own_layers and not ModelOptions(final_softcap=30.0, score_softcap=50.0).own_layers
    assert ModelOptions(norms="post").own_layers and ModelOptions(rotations=(ROTARY, None)).own_layers
