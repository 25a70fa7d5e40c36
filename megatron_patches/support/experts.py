"""Lists and checks the supported values of the fields of Megatron's configuration about mixtures of experts.

Rows (hidden states of tokens) go to experts by exchanges of this project, in place of Megatron's token dispatcher. A
micro-batch may run as two parts, called nano-batches, each with its own exchanges.
"""

from __future__ import annotations

from numbers import Real
from typing import get_args

from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from megatron_patches.support.limits import Limit, check_limit

# Fields that are not in LIMITS; ``check_experts`` limits some of them. The key names the code that reads them, or says
# why no code does.
_OTHERS = {
    "megatron's configuration, routers and experts, and the losses for balance between experts": """
        num_moe_experts moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_ffn_hidden_size
        moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_dtype moe_router_enable_expert_bias
        moe_router_bias_update_rate moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
        moe_grad_scale_func moe_layer_recompute moe_router_topk_limited_devices expert_model_parallel_size""",
    "no code, as code of this project, which computes the same formula, takes megatron's place": """
        moe_grouped_gemm moe_use_legacy_grouped_gemm moe_permute_fusion moe_router_fusion moe_per_layer_logging
        use_grouped_gemm_for_shared_expert moe_single_grouped_weight moe_single_grouped_bias
        use_fused_weighted_squared_relu overlap_dispatch_backward_with_experts_wgrad""",
    "no code, while the dispatcher is alltoall and no rows are dropped": """
        moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
        moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing
        moe_ncclep_static_shape moe_ncclep_zero_copy moe_token_drop_policy moe_extended_tp
        expert_tensor_parallel_num_weight_shards""",
    "no code, as other kinds of load balancing are refused": "moe_router_quantile_balancing_ema",
}
_DROPS = "two nano-batches would drop other rows than the whole micro-batch"
_FP8 = "experts are computed in the type of their weights"
_INTERLEAVED = "in linear_fc1's weight all rows of the gate lie before all rows of the up projection"

LIMITS = {
    "moe_token_dispatcher_type": Limit(
        "rows go to experts by exchanges of our own, which take the place of the alltoall dispatcher", ("alltoall",)
    ),
    "expert_tensor_parallel_size": Limit("a rank has whole experts, also with tensor parallelism", (1,)),
    "moe_expert_capacity_factor": Limit(_DROPS, (None,), inert="moe_pad_expert_input_to_capacity"),
    "moe_expert_rank_capacity_factor": Limit(_DROPS, (None,)),
    "moe_router_score_function": Limit(
        "the installed Megatron-Core has no such scores",
        get_args(TransformerConfig.__dataclass_fields__["moe_router_score_function"].type),
    ),
    "moe_token_dropping": Limit(_DROPS, (False,)),
    "expert_gtp_weight_remat_size": Limit("ranks keep all weights of their experts", (1,)),
    "moe_mlp_glu_interleave_size": Limit(_INTERLEAVED, (None,)),
    "moe_shared_expert_glu_interleave_size": Limit(_INTERLEAVED, (None,)),
    "moe_latent_size": Limit("experts read and write whole rows", (None,)),
    "moe_input_jitter_eps": Limit("two nano-batches would draw other noise than the whole micro-batch", (None,)),
    "moe_router_force_load_balancing": Limit("rows go where the router sends them", (False,)),
    "moe_router_force_biased": Limit("rows go where the router sends them", (None,)),
    "moe_enable_routing_replay": Limit("rows go where the router sends them", (False,)),
    "moe_shared_expert_overlap": Limit("shared experts run on the stream of their layer", (False,)),
    "moe_apply_probs_on_input": Limit("the outputs of experts are scaled, not their inputs", (False,)),
    "moe_router_padding_for_quantization": Limit(_FP8, (False, None)),
    "moe_router_padding_for_fp8": Limit(_FP8, (False, None)),
    "fp8": Limit(_FP8, (None,)),
}
"""Fields of which a model with experts supports some values only."""

EXPERT_FIELDS = {
    *" ".join(_OTHERS.values()).split(),
    *" ".join(limit.inert for limit in LIMITS.values()).split(),
    *LIMITS,
} - {"fp8"}
"""All fields that say something of experts."""

_LOSSES = ("none", "aux_loss", "seq_aux_loss")


def check_expert_groups(stage_ranks: int, ep: int) -> None:
    """Raises SupportError unless ``ep`` expert-parallel ranks divide the ``stage_ranks`` ranks of a pipeline stage."""
    if stage_ranks % ep:
        raise SupportError(
            f"expert_model_parallel_size is {ep}, which does not divide the {stage_ranks} ranks of a pipeline stage: "
            "set it to a divisor."
        )


def check_experts(config: TransformerConfig) -> None:
    """Raises SupportError if a setting of experts is not supported; the message names the first such field."""
    experts = config.num_moe_experts
    if not experts:
        if config.expert_model_parallel_size != 1:
            raise SupportError(
                f"expert_model_parallel_size is {config.expert_model_parallel_size}, but the model has no experts: "
                f"set it to 1, or num_moe_experts to a multiple of {config.expert_model_parallel_size}."
            )
        return
    for name, limit in LIMITS.items():
        if hasattr(config, name):
            check_limit(name, getattr(config, name), limit)
    if config.add_bias_linear and config.moe_shared_expert_intermediate_size:
        raise SupportError(
            "add_bias_linear is True, but a shared expert has no biases: set add_bias_linear to False, or "
            "moe_shared_expert_intermediate_size to None."
        )
    if experts % config.expert_model_parallel_size:
        raise SupportError(
            f"num_moe_experts is {experts}, which expert_model_parallel_size {config.expert_model_parallel_size} does "
            "not divide, but all ranks must have equally many experts: set expert_model_parallel_size to a divisor."
        )
    if not 1 <= config.moe_router_topk <= experts:
        raise SupportError(
            f"moe_router_topk is {config.moe_router_topk}, but num_moe_experts is {experts}: set moe_router_topk to 1 "
            f"up to {experts}."
        )
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    for kind in kinds if isinstance(kinds, list | tuple) else [kinds]:
        check_limit(
            "moe_router_load_balancing_type",
            kind,
            Limit("a balance loss is for each micro-batch (aux_loss) or each document (seq_aux_loss)", _LOSSES),
        )
    if isinstance(kinds, str) != isinstance(coefficients, Real) or not isinstance(kinds, str | list):
        raise SupportError(
            f"moe_router_load_balancing_type is {kinds!r}, but moe_aux_loss_coeff is {coefficients!r}: set them to a "
            "word and a number, or to two lists."
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise SupportError(
            f"sequence_parallel is False with tensor_model_parallel_size {config.tensor_model_parallel_size}, but "
            "every rank sends rows of its own to the experts: set sequence_parallel to True."
        )
