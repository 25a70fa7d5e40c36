"""Fields that the config.json of every family may have, and what is said of those that belong to other models."""

from __future__ import annotations

from typing import Final

from distca.models.fields import OFF, Field, Inert, LeftOut, Only, Read

_GENERATION: Final[Field] = Inert("It says how text is generated.")
_ORIGIN = Inert("It says who made the file.")
_LABELS = Inert("It belongs to classifiers.")
_OUTPUTS = Inert("It says what a call returns.")
_START = Inert("It says how weights are drawn, and these are read.")
_IDS = Inert("It names an id; texts take the tokenizer's.")
_IMPLEMENTATION = Inert("It says with which code transformers computes the same.")
_ENCODER = Only(OFF, "only decoders are served")

_NUMBERS = ("num_beams", "num_beam_groups", "num_return_sequences", "min_length", "max_length", "temperature", "top_k")
_GENERATED = (
    *_NUMBERS,
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "remove_invalid_values",
    "repetition_penalty",
    "suppress_tokens",
    "target_lookbehind",
    "task_specific_params",
    "top_p",
    "typical_p",
    "use_cache",
)

COMMON: Final[dict[str, Field]] = {
    "model_type": Read("text"),
    "architectures": Read("texts", None, optional=True),
    "dtype": Read("text", None, optional=True),
    "torch_dtype": Read("text", None, optional=True),
    "tie_word_embeddings": Read("switch", None),
    "is_causal": Only((True, None), "every token attends to those before it only"),
    "is_encoder_decoder": _ENCODER,
    "add_cross_attention": _ENCODER,
    "cross_attention_hidden_size": _ENCODER,
    "tie_encoder_decoder": _ENCODER,
    "quantization_config": Only(OFF, "quantised weights cannot be trained; use the folder that they were made from"),
    "compression_config": Only(OFF, "compressed weights cannot be trained; use the folder that they were made from"),
    "per_layer_config": Only(OFF, "all layers have the same sizes here"),
    "pruned_heads": Only(OFF, "all layers have the same heads here"),
    "transformers_weights": Only(OFF, "weights are read from model.safetensors or its index only"),
    "configuration_files": Only(OFF, "only config.json itself is read"),
    "fusion_config": Only(OFF, "weights are read as they are"),
    "auto_map": LeftOut(
        "code that comes with the weights, which is never run; what transformers itself has of this name is trained"
    ),
    "chunk_size_feed_forward": Inert("An MLP in chunks computes the same."),
    "is_decoder": Inert("These models are decoders in any case."),
    "initializer_range": _START,
    "pretraining_tp": Inert("It cuts the first training's products; transformers left it out."),
    "tie_last_hidden_states": _OUTPUTS,
    "output_hidden_states": _OUTPUTS,
    "output_attentions": _OUTPUTS,
    "output_scores": _OUTPUTS,
    "return_dict": _OUTPUTS,
    "return_dict_in_generate": _OUTPUTS,
    "use_return_dict": _OUTPUTS,
    "torchscript": _IMPLEMENTATION,
    "use_bfloat16": _IMPLEMENTATION,
    "tf_legacy_loss": _IMPLEMENTATION,
    "gradient_checkpointing": _IMPLEMENTATION,
    "attn_implementation": _IMPLEMENTATION,
    "_attn_implementation": _IMPLEMENTATION,
    "_attn_implementation_autoset": _IMPLEMENTATION,
    "_experts_implementation": _IMPLEMENTATION,
    "experts_implementation": _IMPLEMENTATION,
    "use_flash_attn": _IMPLEMENTATION,
    "distributed_config": _IMPLEMENTATION,
    "base_model_tp_plan": _IMPLEMENTATION,
    "base_model_pp_plan": _IMPLEMENTATION,
    "id2label": _LABELS,
    "label2id": _LABELS,
    "num_labels": _LABELS,
    "problem_type": _LABELS,
    "finetuning_task": _LABELS,
    "classifier_dropout": _LABELS,
    "transformers_version": _ORIGIN,
    "name_or_path": _ORIGIN,
    "_name_or_path": _ORIGIN,
    "_commit_hash": _ORIGIN,
    "_from_model_config": _ORIGIN,
    "unsloth_version": _ORIGIN,
    "unsloth_fixed": _ORIGIN,
    "transformers.js_config": Inert("It is for another program."),
    "tokenizer_class": Inert("The tokenizer is read from tokenizer.json."),
    "prefix": _GENERATION,
    "bos_token_id": _IDS,
    "eos_token_id": _IDS,
    "pad_token_id": Inert(
        "Nothing is filled up. Its embedding is trained where a text has it, which transformers does not."
    ),
    "sep_token_id": _IDS,
    "decoder_start_token_id": _IDS,
    **dict.fromkeys(_GENERATED, _GENERATION),
}
"""The fields that every configuration class of transformers has, of any version; a family's own table goes before."""

_BIASES = Only(OFF, "the class of this model type in transformers has no such biases")
_EXPERTS = Only(OFF, "the class of this model type in transformers has no such experts")
_LATENT = Only(OFF, "the class of this model type in transformers has no latent attention")
_SOFTCAP = Only(OFF, "scores and logits are not capped")
_NO_ROPE = Only(OFF, "positions turn in all layers here")
_PARTIAL = Only((None, 1), "rotary positions turn all of a head here")
_MULTIPLIER = Only((None, 1), "nothing is multiplied on the way here")

ELSEWHERE: Final[dict[str, Field]] = {
    "attention_bias": _BIASES,
    "attention_out_bias": _BIASES,
    "mlp_bias": _BIASES,
    "use_bias": _BIASES,
    "qkv_bias": _BIASES,
    "use_qkv_bias": _BIASES,
    "lm_head_bias": _BIASES,
    "num_local_experts": _EXPERTS,
    "num_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "moe_intermediate_size": _EXPERTS,
    "moe_num_experts": _EXPERTS,
    "kv_lora_rank": _LATENT,
    "q_lora_rank": _LATENT,
    "attn_logit_softcapping": _SOFTCAP,
    "final_logit_softcapping": _SOFTCAP,
    "output_logit_soft_cap": _SOFTCAP,
    "logits_soft_cap": _SOFTCAP,
    "embedding_multiplier": _MULTIPLIER,
    "residual_multiplier": _MULTIPLIER,
    "lm_head_multiplier": _MULTIPLIER,
    "key_multiplier": _MULTIPLIER,
    "logits_scaling": _MULTIPLIER,
    "logit_scale": _MULTIPLIER,
    "scale_emb": _MULTIPLIER,
    "scale_depth": Only(OFF, "nothing is multiplied on the way here"),
    "dim_model_base": Only(OFF, "nothing is multiplied on the way here"),
    "attention_multiplier": Only(OFF, "attention scores are divided by the root of head_dim here"),
    "query_pre_attn_scalar": Only(OFF, "attention scores are divided by the root of head_dim here"),
    "no_rope_layers": _NO_ROPE,
    "no_rope_layer_interval": _NO_ROPE,
    "partial_rotary_factor": _PARTIAL,
    "rotary_percent": _PARTIAL,
    "rotary_pct": _PARTIAL,
    "rope_interleave": Only(OFF, "halves of a head turn together here, not neighbours"),
    "rope_interleaved": Only(OFF, "halves of a head turn together here, not neighbours"),
    "use_qk_norm": Only(OFF, "of these models only Qwen3 has norms of queries and keys"),
    "qk_layernorm": Only(OFF, "of these models only Qwen3 has norms of queries and keys"),
    "use_bidirectional_attention": Only(OFF, "every token attends to those before it only"),
    "num_nextn_predict_layers": Only(
        OFF, "the class of this model type in transformers has no layers that predict further tokens"
    ),
    "sliding_window": Only(OFF, "the class of this model type in transformers knows no windows"),
    "layer_types": Only(OFF, "the class of this model type in transformers knows no kinds of layers"),
    "activation": Only((None, "silu", "swish", "swiglu"), "only silu is served"),
    "hidden_activation": Only((None, "silu", "swish"), "only silu is served"),
    "position_embedding_type": Only((None, "rope", "rotary"), "only rotary positions are served"),
    "dual_chunk_attention_config": LeftOut(
        "which transformers leaves out too: attention is whole here, beyond the first training's context as well"
    ),
    "use_sliding_window": Inert("A class that has no such field takes sliding_window alone."),
    "max_window_layers": Inert("A class that has no such field takes sliding_window alone."),
    "residual_dropout": Only(OFF, "no dropout is served; set it to 0"),
    "resid_pdrop": Only(OFF, "no dropout is served; set it to 0"),
    "embd_pdrop": Only(OFF, "no dropout is served; set it to 0"),
    "hidden_dropout": Only(OFF, "no dropout is served; set it to 0"),
}
"""Fields that other model types read: what is said of those that are well known."""

SHAPE: Final[dict[str, Field]] = {
    "hidden_size": Read("count"),
    "intermediate_size": Read("count"),
    "num_hidden_layers": Read("count"),
    "num_attention_heads": Read("count"),
    "num_key_value_heads": Read("count"),
    "vocab_size": Read("count"),
    "max_position_embeddings": Read("count"),
    "rms_norm_eps": Read("number"),
    "head_dim": Read("count", None, optional=True),
    "hidden_act": Only(("silu", "swish"), "only silu is served"),
    "attention_dropout": Only(OFF, "core attention has none; set it to 0"),
    "rope_theta": Read("number", None),
    "rope_parameters": Read("fields", None, optional=True),
    "rope_scaling": Read("fields", None, optional=True),
    "original_max_position_embeddings": Read("count", None),
}
"""The fields for the shape of a model, which all families of dense decoders have."""
