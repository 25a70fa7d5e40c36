"""Models as they are built: served, or refused with what they were built with."""

import copy
import inspect
import warnings
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.testing.ranks import run_ranks
from megatron_patches.support.built_model import ARGUMENTS, SERVED_ARGUMENTS, check_model
from tests.megatron_patches.support.cases import LLAMA, refusal


def test_every_argument_of_the_model_is_sorted_once():
    arguments = set(inspect.signature(GPTModel.__init__).parameters) - {"self"}
    assert arguments == SERVED_ARGUMENTS | set(ARGUMENTS)
    assert not SERVED_ARGUMENTS & set(ARGUMENTS)


def _models():
    """What check_model says of models that differ from a served one: {what: (expected, found)}."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from megatron_patches.layers.block import block_spec
    from megatron_patches.model.model_options import ModelOptions
    from megatron_patches.ranks.groups import initialize_model_parallel

    initialize_model_parallel(1, 1, 1)
    results = {}

    def build(config=None, spec=None, **arguments):
        config = config or TransformerConfig(**LLAMA)
        spec = spec or block_spec(config)
        named = {"config": config, "transformer_layer_spec": spec, "vocab_size": 16, "max_sequence_length": 32}
        return GPTModel(**named, **{"position_embedding_type": "rope", **arguments})

    def note(what, expected, model, **how):
        results[what] = (expected, refusal(partial(check_model, **how), model))

    note("served", None, build())
    note("scaled", None, build(rope_scaling=True, rope_scaling_factor=4.0, seq_len_interpolation_factor=2.0))
    note("tied", None, build(share_embeddings_and_output_weights=True, rotary_base=500000, parallel_output=False))
    note("no embedding", None, build(pre_process=False))
    note("no loss", None, build(post_process=False))
    note("norms of heads", None, build(TransformerConfig(**LLAMA, qk_layernorm=True)))
    note("biases", None, build(TransformerConfig(**LLAMA, add_qkv_bias=True)))

    note(
        "learned",
        "position_embedding_type is 'learned_absolute', but",
        build(position_embedding_type="learned_absolute"),
    )
    note("none", "position_embedding_type is 'none', but", build(position_embedding_type="none"))
    note("partial", None, build(rotary_percent=0.5))
    note("chunk", "vp_stage is 1, but", build(vp_stage=1))
    note("float16", "fp16_lm_cross_entropy is True, but", build(fp16_lm_cross_entropy=True))
    note(
        "scatter",
        "scatter_embedding_sequence_parallel is False, but",
        build(scatter_embedding_sequence_parallel=False),
    )

    overridden = TransformerConfig(**LLAMA)
    overridden.position_embedding_type = "rope"
    note(
        "two types",
        "position_embedding_type is 'learned_absolute', but",
        build(overridden, position_embedding_type="learned_absolute"),
    )
    late = build()
    late.config.softmax_type = "off-by-one"
    note("configuration", "softmax_type is 'off-by-one', but", late)

    stock = get_gpt_layer_local_spec(normalization="RMSNorm")
    note(
        "stock",
        "decoder.final_layernorm is a torch.nn.modules.normalization.RMSNorm, but only megatron_patches.",
        build(spec=stock),
    )
    norm = build()
    norm.decoder.layers[1].pre_mlp_layernorm = torch.nn.RMSNorm(32)
    note("norm", "decoder.layers.1.pre_mlp_layernorm is a torch.nn.modules.normalization.RMSNorm", norm)
    adapter = build()
    adapter.decoder.layers[0].mlp.linear_fc2 = torch.nn.Linear(4, 4)
    note(
        "adapter",
        "decoder.layers.0.mlp.linear_fc2 is a torch.nn.modules.linear.Linear, but only megatron.core.",
        adapter,
    )
    head = build()
    head.output_layer = torch.nn.Linear(4, 4)
    note("head", "output_layer is a torch.nn.modules.linear.Linear, but only megatron.core.", head)
    shallow = build()
    del shallow.decoder.layers[1]
    note("shallow", "decoder has 1 layers, but num_layers and pipeline_model_parallel_size of the con", shallow)
    swapped = build()
    swapped.decoder.layers = torch.nn.ModuleList([*swapped.decoder.layers][::-1])
    note("swapped", "decoder.layers.0 was built as layer 2 of the model, but is at the place of layer 1", swapped)
    layer = build()
    layer.decoder.layers[1].__class__ = TransformerLayer
    note("layer", "decoder.layers.1 is a megatron.core.transformer.transformer_layer.TransformerLayer, but", layer)
    cross = build()
    cross.decoder.layers[0].cross_attention = torch.nn.Linear(4, 4)
    note("cross", "decoder.layers.0.cross_attention is a torch.nn.modules.linear.Linear, but", cross)
    dropout = build()
    dropout.decoder.layers[0].hidden_dropout = 0.3
    note("dropout", "decoder.layers.0.hidden_dropout is 0.3, but", dropout)
    own = build()
    own.decoder.layers[0].mlp.config = copy.copy(own.config)
    note("own configuration", "decoder.layers.0 has a configuration of its own, but", own)

    heads = build(TransformerConfig(**LLAMA, qk_layernorm=True))
    heads.config.qk_layernorm = False
    said = "qk_layernorm is False, but decoder.layers.0.self_attention.q_layernorm is a RMSNorm"
    note("norms of heads in the spec only", said, heads)
    options = ModelOptions(norms="post", attention_output_bias=True, mlp_bias=True)
    spec = block_spec(TransformerConfig(**LLAMA), options=options)
    note("options", None, build(spec=spec), options=options)
    said = "decoder.layers.0 was built with other model options than CAD has"
    note("other options", said, build(), options=ModelOptions(residual_multiplier=0.5))
    note("norms elsewhere", "decoder.layers.0.input_layernorm is a megatron.core", build(spec=spec))
    groups = build()
    groups.pg_collection = copy.copy(groups.pg_collection)
    groups.pg_collection.tp = torch.distributed.new_group([0], backend="gloo")
    note("groups", "pg_collection has a tp group of its own, but", groups)
    return results


def test_models():
    for what, (expected, found) in run_ranks(1, _models)[0].items():
        if expected is None:
            assert found is None, (what, found)
        else:
            assert found is not None and found.startswith(expected), (what, found)
