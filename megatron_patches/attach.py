"""Checks a built model, and changes it so that it runs steps of a ``distca.CAD``; for ``CAD.attach``."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.errors import SupportError
from distca.ops.logits import LogitTransform
from distca.runtime import AttentionPool
from megatron_patches.arguments import CadArguments
from megatron_patches.experts.balance import ExpertLoad
from megatron_patches.experts.layer import take_nano_batches
from megatron_patches.experts.untracked import warn_when_logged
from megatron_patches.layers.block import disaggregate_block
from megatron_patches.layers.full_recompute import recompute_layers, train_recomputed_mlps
from megatron_patches.layers.latent import use_row_angles
from megatron_patches.layers.layer import SplitTransformerLayer, keep_outputs_of
from megatron_patches.layers.packed_attention import PackedAttention
from megatron_patches.layers.rotations import LayerRotary
from megatron_patches.model.latent import is_latent
from megatron_patches.model.layer_kinds import LayerKinds
from megatron_patches.patches.fused_ops import fuse_swiglu
from megatron_patches.patches.gpt_forward import patch_forward, scale_embeddings, transform_logits
from megatron_patches.patches.position_rotary import use_position_rotary
from megatron_patches.steps.batch_context import DisaggregatedMicroBatch, PackedMicroBatch
from megatron_patches.support.attached import check_same_config, never_called, note_attached
from megatron_patches.support.built_model import check_bare, check_model
from megatron_patches.support.model_options import check_own_rotary


def check_attachable(model: LanguageModule, config: TransformerConfig, given: CadArguments, kinds: LayerKinds) -> None:
    """Checks a model that was built for a CAD with this configuration and these arguments.

    The CAD plans for attention layers of these ``kinds``.

    Raises:
        SupportError: the model's class or a part of the model is not supported; or the model has another configuration
            or other kinds of attention layers.
    """
    options, pattern = given.model_options, given.hybrid_layer_pattern
    check_bare(model, pattern)
    check_same_config(model, config)  # the checks below assume that both have equally many layers
    if pattern:
        from megatron_patches.support.hybrid_model import check_hybrid_model

        check_hybrid_model(model, pattern, options)
    else:
        check_model(model, SplitTransformerLayer if given.own_layers(config) else TransformerLayer, options)
        check_own_rotary(model, options)
    if LayerKinds.of(model.config, options.score_softcap, pattern) != kinds:
        raise SupportError(
            "Windows, sinks or softmax_scale of the model's configuration are not what CAD was made with, and "
            "plans depend on them: set them before CAD is made, and do not change them."
        )


def change_model(model: LanguageModule, config: TransformerConfig, given: CadArguments, pool: AttentionPool) -> None:
    """Changes a checked model in place; ``pool`` is the CAD's."""
    options, pattern, recompute_all = given.model_options, given.hybrid_layer_pattern, given.recompute == "all"
    _change_positions(model, config, given)
    patch_forward(model, DisaggregatedMicroBatch if given.disaggregate else PackedMicroBatch)
    transform_logits(model, LogitTransform(options.logit_multiplier, options.final_softcap))
    scale_embeddings(model, options.embedding_scale)
    fuse_swiglu(model)
    model.expert_load = ExpertLoad(take_nano_batches(model), config.moe_router_topk)
    if config.num_moe_experts:
        warn_when_logged()
    # With recompute_all only one layer at a time keeps outputs of norms and SwiGLU, which takes little memory.
    keep_outputs_of(model, given.keep_outputs or recompute_all)
    if given.disaggregate or pattern:
        disaggregate_block(model.decoder, pool, recompute_all, bool(given.servers))
    elif recompute_all:
        recompute_layers(model.decoder)
    elif not given.own_layers(config):
        train_recomputed_mlps(model.decoder)
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.kernel, module.timeline = pool.kernel, pool.timeline
            module.kind = replace(module.kind, softcap=options.score_softcap)
    uncalled = never_called(given.disaggregate, hybrid=bool(pattern), own_layers=given.own_layers(config))
    note_attached(model, pool, uncalled)


def _change_positions(model: LanguageModule, config: TransformerConfig, given: CadArguments) -> None:
    own = use_position_rotary(model)
    if is_latent(config):
        use_row_angles(model)
    elif given.own_layers(config):
        layers = [layer.layer_number for layer in model.decoder.layers]
        model.rotary_pos_emb = LayerRotary(own, config, given.model_options, layers)
        model.position_embedding_type = "rope"  # with "none" a HybridModel would not call rotary_pos_emb
