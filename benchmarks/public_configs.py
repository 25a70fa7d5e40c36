"""The settings of public models' config.json, by name: model type, the fields that matter, and why some are refused.

Sizes are those of the models; ``shrunk`` makes them small and keeps everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.family_models import VISION_OF_QWEN


class Public(NamedTuple):
    """A model's configuration.

    Attributes:
        fields: of its config.json.
        refused: what the sentence says with which it is refused; empty where it is served.
        warned: what a warning about it says; empty where there is none.
    """

    fields: dict[str, Any]
    refused: str = ""
    warned: str = ""


def _sizes(
    hidden: int, layers: int, ffn: int, heads: int, kv_heads: int, vocabulary: int, positions: int, base: float
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_theta": base,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    }


def _without(*names: str, of: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in of.items() if name not in names}


def _of(model_type: str, architecture: str, sizes: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **sizes, **fields}


def _llama(*sizes: Any, **fields: Any) -> dict[str, Any]:
    own = {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1}
    return _of("llama", "LlamaForCausalLM", _sizes(*sizes), **own | {"bos_token_id": 1, "eos_token_id": 2} | fields)


def _deepseek(*sizes: Any, **fields: Any) -> dict[str, Any]:
    own = {
        **{"attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoModel": "code.Model"}, "ep_size": 1},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"moe_layer_freq": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        **{"aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1},
    }
    return _of("deepseek_v3", "DeepseekV3ForCausalLM", _sizes(*sizes), **own | fields)


_HYBRID = ["linear_attention"] * 3 + ["full_attention"]


def _qwen_hybrid(model_type: str, sizes: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [],
    }
    kept = {name: value for name, value in sizes.items() if name != "rope_theta" or "rope_parameters" not in fields}
    return {"model_type": model_type, **kept, **own, **fields}


def _mistral(*sizes: Any, **fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None}
    return _of("mistral", "MistralForCausalLM", _sizes(*sizes), **own | fields)


def _qwen2(*sizes: Any, **fields: Any) -> dict[str, Any]:
    own = {"attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    return _of("qwen2", "Qwen2ForCausalLM", _sizes(*sizes), **own | {"rms_norm_eps": 1e-6} | fields)


def _qwen3(*sizes: Any, **fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        **{"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "rms_norm_eps": 1e-6},
        **{"use_sliding_window": False, "sliding_window": None, "max_window_layers": 36, "rope_scaling": None},
    }
    return _of("qwen3", "Qwen3ForCausalLM", _sizes(*sizes), **own | fields)


def _phi3(*sizes: Any, **fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        **{"attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        **{"original_max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": None},
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3"},
    }
    return _of("phi3", "Phi3ForCausalLM", _sizes(*sizes), **own | fields)


def _gemma(model_type: str, architecture: str, sizes: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 256, "rms_norm_eps": 1e-6}
    own |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
    sizes = {name: value for name, value in sizes.items() if name not in ("hidden_act", "tie_word_embeddings")}
    return _of(model_type, architecture, sizes, **own | fields)


def _olmo(model_type: str, architecture: str, sizes: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    own = {"attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6}
    return _of(model_type, architecture, sizes, **own | fields)


def _mistral3(**text: Any) -> dict[str, Any]:
    sizes = _sizes(5120, 40, 32768, 32, 8, 131072, 131072, 1e9)
    inner = {name: value for name, value in sizes.items() if name not in ("torch_dtype", "transformers_version")}
    inner.pop("tie_word_embeddings")
    inner |= {"attention_dropout": 0.0, "head_dim": 128, "model_type": "mistral", "sliding_window": None}
    return {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "text_config": inner | text,
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24, "patch_size": 14},
    }


def _other(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    return _of(model_type, architecture, _sizes(4096, 32, 14336, 32, 8, 128000, 32768, 1e6), **fields)


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_LLAMA8 = (4096, 32, 14336, 32, 8, 128256, 131072, 500000.0)
_LLAMA70 = (8192, 80, 28672, 64, 8, 128256, 131072, 500000.0)
_LLAMA2 = (4096, 32, 11008, 32, 32, 32000, 4096, 10000.0)
_MISTRAL7 = (4096, 32, 14336, 32, 8, 32000, 32768, 10000.0)
_QWEN7 = (3584, 28, 18944, 28, 4, 152064, 131072, 1e6)
_QWEN3_8 = (4096, 36, 12288, 32, 8, 151936, 40960, 1e6)
_PHI4 = (5120, 40, 17920, 40, 10, 100352, 16384, 250000.0)
_PHI_MINI = (3072, 32, 8192, 32, 32, 32064, 4096, 10000.0)
_CODE = "auto_map, code that comes with the weights"
_DROPOUT = "attention_dropout 0.1, which is left out"
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}

PUBLIC: dict[str, Public] = {
    "Llama-2-7b": Public(_llama(*_LLAMA2, rope_scaling=None)),
    "Llama-2-70b": Public(_llama(8192, 80, 28672, 64, 8, 32000, 4096, 10000.0, rope_scaling=None)),
    "CodeLlama-7b": Public(_llama(4096, 32, 11008, 32, 32, 32016, 16384, 1e6, rope_scaling=None)),
    "CodeLlama-34b": Public(_llama(8192, 48, 22016, 64, 8, 32000, 16384, 1e6)),
    "vicuna-7b-v1.5-16k": Public(
        _llama(*_LLAMA2, rope_scaling={"factor": 4.0, "type": "linear"}, max_sequence_length=16384),
        warned="max_sequence_length, which no class of transformers reads",
    ),
    "Yarn-Llama-2-7b-128k": Public(
        _llama(
            *(4096, 32, 11008, 32, 32, 32000, 131072, 10000.0),
            rope_scaling={
                **{"factor": 32.0, "finetuned": True, "type": "yarn"},
                "original_max_position_embeddings": 4096,
            },
            auto_map={"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
        ),
        warned=_CODE,
    ),
    "Llama-3-8B": Public(_llama(4096, 32, 14336, 32, 8, 128256, 8192, 500000.0, rope_scaling=None)),
    "Llama-3.1-8B": Public(_llama(*_LLAMA8, rope_scaling=_llama3(8.0))),
    "Llama-3.1-70B": Public(_llama(*_LLAMA70, rope_scaling=_llama3(8.0), eos_token_id=[1, 2, 3])),
    "Llama-3.2-1B": Public(
        _llama(
            *(2048, 16, 8192, 32, 8, 128256, 131072, 500000.0),
            head_dim=64,
            rope_scaling=_llama3(32.0),
            tie_word_embeddings=True,
        )
    ),
    "Llama-3.2-3B": Public(
        _llama(
            *(3072, 28, 8192, 24, 8, 128256, 131072, 500000.0),
            head_dim=128,
            rope_scaling=_llama3(32.0),
            tie_word_embeddings=True,
        )
    ),
    "Llama-3.3-70B-Instruct": Public(_llama(*_LLAMA70, rope_scaling=_llama3(8.0), head_dim=128)),
    "DeepSeek-R1-Distill-Llama-8B": Public(_llama(*_LLAMA8, rope_scaling=_llama3(8.0))),
    "deepseek-llm-7b": Public(_llama(4096, 30, 11008, 32, 32, 102400, 4096, 10000.0, rope_scaling=None)),
    "deepseek-coder-6.7b": Public(
        _llama(4096, 32, 11008, 32, 32, 32256, 16384, 100000, rope_scaling={"factor": 4.0, "type": "linear"})
    ),
    "TinyLlama-1.1B": Public(_llama(2048, 22, 5632, 32, 4, 32000, 2048, 10000.0, rope_scaling=None)),
    "Yi-1.5-9B": Public(_llama(4096, 48, 11008, 32, 4, 64000, 4096, 5e6, rope_scaling=None)),
    "Yi-34B-200K": Public(_llama(7168, 60, 20480, 56, 8, 64000, 200000, 1e7)),
    "SOLAR-10.7B": Public(_llama(4096, 48, 14336, 32, 8, 32000, 4096, 10000.0, rope_scaling=None)),
    "SmolLM2-1.7B": Public(
        _llama(
            *(2048, 24, 8192, 32, 32, 49152, 8192, 130000),
            rope_interleaved=False,
            tie_word_embeddings=True,
            **{"transformers.js_config": {"dtype": "q4"}},
        )
    ),
    "Falcon3-7B": Public(_llama(3072, 28, 23040, 12, 4, 131072, 32768, 1000042, activation="swiglu", head_dim=256)),
    "Llama-3.1-8B, FP8": Public(
        _llama(*_LLAMA8, quantization_config={"quant_method": "compressed-tensors"}), "quantised weights"
    ),
    "granite-8b-code": Public(_llama(4096, 36, 14336, 32, 8, 49152, 4096, 1e7, attention_bias=True, mlp_bias=True)),
    "Mistral-7B-v0.1": Public(_mistral(*_MISTRAL7, sliding_window=4096)),
    "zephyr-7b-beta": Public(_mistral(*_MISTRAL7, sliding_window=4096, pad_token_id=2)),
    "Mistral-7B-Instruct-v0.2": Public(_mistral(4096, 32, 14336, 32, 8, 32000, 32768, 1e6)),
    "Mistral-7B-v0.3": Public(_mistral(4096, 32, 14336, 32, 8, 32768, 32768, 1e6)),
    "Yarn-Mistral-7b-128k": Public(
        _mistral(
            *_MISTRAL7,
            sliding_window=131072,
            rope_scaling={
                **{"factor": 16.0, "finetuned": True, "type": "yarn"},
                "original_max_position_embeddings": 8192,
            },
            auto_map={"AutoModelForCausalLM": "modeling_mistral_yarn.MistralForCausalLM"},
        ),
        warned=_CODE,
    ),
    "Mistral-Nemo-2407": Public(_mistral(5120, 40, 14336, 32, 8, 131072, 1024000, 1e6, head_dim=128)),
    "Mistral-Small-24B-2501": Public(_mistral(5120, 40, 32768, 32, 8, 131072, 32768, 1e8, head_dim=128)),
    "Mistral-Large-2407": Public(_mistral(12288, 88, 28672, 96, 8, 32768, 131072, 1e6)),
    "Codestral-22B": Public(_mistral(6144, 56, 16384, 48, 8, 32768, 32768, 1e6)),
    "Ministral-8B-Instruct-2410": Public(
        _mistral(4096, 36, 12288, 32, 8, 131072, 32768, 1e8, head_dim=128, sliding_window=32768)
    ),
    "Mistral-Small-3.1-24B": Public(_mistral3()),
    "Mistral-Small-3.2-24B": Public(_mistral3(tie_word_embeddings=False)),
    "Qwen1.5-7B": Public(_qwen2(4096, 32, 11008, 32, 32, 151936, 32768, 1e6, sliding_window=32768)),
    "Qwen2-0.5B": Public(_qwen2(896, 24, 4864, 14, 2, 151936, 131072, 1e6, tie_word_embeddings=True)),
    "Qwen2-7B": Public(_qwen2(*_QWEN7)),
    "Qwen2.5-0.5B": Public(
        _qwen2(896, 24, 4864, 14, 2, 151936, 32768, 1e6, tie_word_embeddings=True, use_mrope=False),
        warned="use_mrope, which no class of transformers reads",
    ),
    "Qwen2.5-72B": Public(_qwen2(8192, 80, 29568, 64, 8, 152064, 131072, 1e6, max_window_layers=80)),
    "Qwen2.5-7B-Instruct with YaRN": Public(_qwen2(*_QWEN7, rope_scaling=_YARN)),
    "Qwen2.5-Math-7B": Public(_qwen2(3584, 28, 18944, 28, 4, 152064, 4096, 10000, sliding_window=4096)),
    "Qwen2.5-Coder-32B": Public(_qwen2(5120, 64, 27648, 40, 8, 152064, 32768, 1e6, max_window_layers=70)),
    "Qwen2.5-7B-Instruct-1M": Public(
        _qwen2(
            *(3584, 28, 18944, 28, 4, 152064, 1010000, 1e7),
            dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192},
        ),
        warned="dual_chunk_attention_config, which transformers leaves out too",
    ),
    "QwQ-32B": Public(_qwen2(5120, 64, 27648, 40, 8, 152064, 40960, 1e6, max_window_layers=64, sliding_window=32768)),
    "DeepSeek-R1-Distill-Qwen-7B": Public(
        _qwen2(3584, 28, 18944, 28, 4, 152064, 131072, 10000, use_mrope=False, sliding_window=4096),
        warned="use_mrope, which no class of transformers reads",
    ),
    "Qwen3-0.6B": Public(_qwen3(1024, 28, 3072, 16, 8, 151936, 40960, 1e6, tie_word_embeddings=True)),
    "Qwen3-8B": Public(_qwen3(*_QWEN3_8)),
    "Qwen3-32B": Public(_qwen3(5120, 64, 25600, 64, 8, 151936, 40960, 1e6)),
    "Qwen3-4B-Instruct-2507": Public(_qwen3(2560, 36, 9728, 32, 8, 151936, 262144, 5e6, tie_word_embeddings=True)),
    "Qwen3-8B, saved by version 5, with Qwen's recipe for YaRN": Public(
        {name: value for name, value in _qwen3(*_QWEN3_8).items() if name != "rope_theta"}
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"rope_type": "yarn"} | _YARN,
        },
        "put the scaling and its rope_theta together into rope_parameters",
    ),
    "DeepSeek-R1-0528-Qwen3-8B": Public(
        _qwen3(
            *(4096, 36, 12288, 32, 8, 151936, 131072, 1e6),
            rope_scaling={
                **{"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419},
                "original_max_position_embeddings": 32768,
            },
        ),
        warned="attn_factor, which no class of transformers reads",
    ),
    "phi-4": Public(_phi3(*_PHI4, original_max_position_embeddings=16384), warned=_CODE),
    "Phi-4-reasoning": Public(
        _phi3(5120, 40, 17920, 40, 10, 100352, 32768, 500000, original_max_position_embeddings=32768), warned=_CODE
    ),
    "Phi-3-mini-4k": Public(_phi3(*_PHI_MINI, sliding_window=2047), warned=_CODE),
    "Phi-3-medium-4k": Public(_phi3(5120, 40, 17920, 40, 10, 32064, 4096, 10000.0, sliding_window=2047), warned=_CODE),
    "Phi-3-mini-128k": Public(
        _phi3(3072, 32, 8192, 32, 32, 32064, 131072, 10000.0, sliding_window=262144, rope_scaling=_LONGROPE),
        warned=_CODE,
    ),
    "Phi-4-mini": Public(
        _phi3(
            *(3072, 32, 8192, 24, 8, 200064, 131072, 10000.0),
            partial_rotary_factor=0.75,
            rope_scaling=_LONGROPE,
            sliding_window=262144,
            tie_word_embeddings=True,
        ),
        warned=_CODE,
    ),
    "Qwen3.5-9B": Public(
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "image_token_id": 248056,
            "video_token_id": 248057,
            "vision_start_token_id": 248053,
            "vision_end_token_id": 248054,
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "qwen3_5"},
            "text_config": _qwen_hybrid(
                "qwen3_5_text",
                _sizes(4096, 32, 12288, 16, 4, 248320, 262144, 1e7),
                mamba_ssm_dtype="float32",
                mtp_num_hidden_layers=1,
                mtp_use_dedicated_embeddings=False,
                layer_types=_HYBRID * 8,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                },
            ),
        }
    ),
    "Qwen3-Next-80B-A3B": Public(
        _qwen_hybrid(
            "qwen3_next",
            _sizes(2048, 48, 5120, 16, 2, 151936, 262144, 1e7),
            architectures=["Qwen3NextForCausalLM"],
            decoder_sparse_step=1,
            moe_intermediate_size=512,
            norm_topk_prob=True,
            num_experts=512,
            num_experts_per_tok=10,
            output_router_logits=False,
            partial_rotary_factor=0.25,
            router_aux_loss_coef=0.001,
            shared_expert_intermediate_size=512,
        )
    ),
    "Nemotron-H-8B-Base": Public(
        _without("hidden_act", "rope_theta", of=_sizes(4096, 52, 21504, 32, 8, 131072, 8192, 1e4))
        | {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "attention_bias": False,
            "attention_head_dim": 128,
            "chunk_size": 128,
            "conv_kernel": 4,
            "hidden_dropout": 0.0,
            "layer_norm_epsilon": 1e-5,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "mamba_num_heads": 128,
            "mamba_proj_bias": False,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "n_groups": 8,
            "residual_in_fp32": False,
            "rescale_prenorm_residual": True,
            "sliding_window": None,
            "ssm_state_size": 128,
            "time_step_floor": 0.0001,
            "time_step_max": 0.1,
            "time_step_min": 0.001,
            "use_bias": False,
            "use_conv_bias": True,
            "use_mamba_kernels": True,
        }
    ),
    "Seed-OSS-36B": Public(
        _of(
            "seed_oss",
            "SeedOssForCausalLM",
            _sizes(5120, 64, 27648, 80, 8, 155136, 524288, 1e7),
            attention_bias=True,
            attention_out_bias=False,
            attention_dropout=0.1,
            residual_dropout=0.1,
            mlp_bias=False,
            head_dim=128,
            rope_scaling={"rope_type": "default"},
        ),
        warned=_DROPOUT,
    ),
    "gemma-2-9b": Public(
        _gemma(
            "gemma2",
            "Gemma2ForCausalLM",
            _sizes(3584, 42, 14336, 16, 8, 256000, 8192, 10000.0),
            hidden_act="gelu_pytorch_tanh",
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            sliding_window=4096,
            cache_implementation="hybrid",
        )
    ),
    "gemma-3-1b": Public(
        _gemma(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _sizes(1152, 26, 6912, 4, 1, 262144, 32768, 1e6),
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            rope_local_base_freq=10000,
            rope_scaling=None,
            sliding_window=512,
            sliding_window_pattern=6,
            cache_implementation="hybrid",
        )
    ),
    "OLMo-2-7B": Public(_olmo("olmo2", "Olmo2ForCausalLM", _sizes(4096, 32, 11008, 32, 32, 100352, 4096, 5e5))),
    "OLMo-3-7B": Public(
        _olmo(
            "olmo3",
            "Olmo3ForCausalLM",
            _sizes(4096, 32, 11008, 32, 32, 100278, 65536, 5e5),
            rope_scaling={
                **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
                **{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
            },
            sliding_window=4096,
            layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8,
        )
    ),
    "SmolLM3-3B": Public(
        _of(
            "smollm3",
            "SmolLM3ForCausalLM",
            _sizes(2048, 36, 11008, 16, 4, 128256, 65536, 5e6),
            **{"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 2},
            **{"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "rope_scaling": None},
            **{"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4},
            **{"layer_types": ["full_attention"] * 36, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        )
    ),
    "granite-3.3-8b": Public(
        _of(
            "granite",
            "GraniteForCausalLM",
            _sizes(4096, 40, 12800, 32, 8, 49159, 131072, 1e7),
            **{"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "rope_scaling": None},
            **{"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0},
            **{"residual_multiplier": 0.22, "tie_word_embeddings": True},
        )
    ),
    "GLM-4-9B-0414": Public(
        _of(
            "glm4",
            "Glm4ForCausalLM",
            _sizes(4096, 40, 13696, 32, 2, 151552, 32768, 1e4),
            **{"attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "partial_rotary_factor": 0.5},
        )
    ),
    "c4ai-command-r7b": Public(
        _of(
            "cohere2",
            "Cohere2ForCausalLM",
            {
                name: value
                for name, value in _sizes(4096, 32, 14336, 32, 8, 256000, 132096, 5e4).items()
                if name not in ("rms_norm_eps", "tie_word_embeddings")
            },
            **{"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "layer_norm_eps": 1e-5},
            **{"logit_scale": 0.25, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_scaling": None},
            **{"position_embedding_type": "rope_gptj", "rotary_pct": 1.0},
        )
    ),
    "EXAONE-4.0-32B": Public(
        _of(
            "exaone4",
            "Exaone4ForCausalLM",
            _sizes(5120, 64, 27392, 40, 8, 102400, 131072, 1e6),
            **{"attention_dropout": 0.0, "head_dim": 128, "rope_scaling": _llama3(16.0), "sliding_window": 4096},
            **{"sliding_window_pattern": "LLLG", "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16},
        )
    ),
    "Ministral-3-8B": Public(
        _mistral3(
            **{"model_type": "ministral3", "hidden_size": 4096, "num_hidden_layers": 34, "intermediate_size": 14336},
            rope_parameters={
                **{"rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0},
                **{"mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1},
                "original_max_position_embeddings": 16384,
            },
        )
    ),
    "gemma-3-12b": Public(
        {
            **{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"},
            **{"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144},
            **{"eos_token_id": [1, 106], "initializer_range": 0.02, "mm_tokens_per_image": 256},
            "text_config": {
                **{"model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360},
                **{"num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8},
                **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
            },
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
        }
    ),
    "ERNIE-4.5-0.3B": Public(
        _of(
            "ernie4_5",
            "Ernie4_5ForCausalLM",
            _sizes(1024, 18, 3072, 16, 2, 103424, 131072, 500000.0),
            **{"head_dim": 128, "use_bias": False, "tie_word_embeddings": True, "rope_scaling": None},
        )
    ),
    "Hunyuan-7B": Public(
        _of(
            "hunyuan_v1_dense",
            "HunYuanDenseV1ForCausalLM",
            _sizes(4096, 32, 14336, 32, 8, 128167, 32768, 10000.0),
            **{"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "mlp_bias": False},
            **{"eod_token_id": 3, "use_qk_norm": True, "use_cla": False, "cla_share_factor": 2, "pad_token_id": 0},
            rope_scaling={
                **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
                **{"mscale_all_dim": 1.0, "type": "dynamic"},
            },
        ),
        warned="cla_share_factor, use_cla, which no class of transformers reads",
    ),
    "AFM-4.5B": Public(
        _of(
            "arcee",
            "ArceeForCausalLM",
            _sizes(2560, 36, 18432, 20, 4, 128004, 65536, 10000.0),
            **{"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "mlp_bias": False},
            hidden_act="relu2",
            rope_scaling={
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "rope_type": "yarn"},
                "original_max_position_embeddings": 4096,
            },
        )
    ),
    "gpt-oss-20b": Public(
        _of(
            "gpt_oss",
            "GptOssForCausalLM",
            _sizes(2880, 24, 2880, 64, 8, 201088, 131072, 150000.0),
            **{"attention_bias": True, "attention_dropout": 0.0, "head_dim": 64, "sliding_window": 128},
            **{"experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 32, "swiglu_limit": 7.0},
            **{"initial_context_length": 4096, "output_router_logits": False, "router_aux_loss_coef": 0.9},
            layer_types=["sliding_attention", "full_attention"] * 12,
            rope_scaling={
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False},
                "original_max_position_embeddings": 4096,
            },
        ),
    ),
    "GLM-4.5-Air": Public(
        _of(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            _sizes(4096, 46, 10944, 96, 8, 151552, 131072, 1e6),
            **{"attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "partial_rotary_factor": 0.5},
            **{"moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "n_routed_experts": 128},
            **{"n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
            **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "use_qk_norm": False, "rope_scaling": None},
        )
    ),
    "GLM-4.5": Public(
        _of(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            _sizes(5120, 92, 12288, 96, 8, 151552, 131072, 1e6),
            **{"attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "partial_rotary_factor": 0.5},
            **{"moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1, "n_routed_experts": 160},
            **{"n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
            **{"first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "use_qk_norm": True, "rope_scaling": None},
        )
    ),
    "Qwen3-30B-A3B": Public(
        _of(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _sizes(2048, 48, 6144, 32, 4, 151936, 40960, 1e6),
            **{"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "rms_norm_eps": 1e-6},
            **{"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True},
            **{"num_experts": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
            **{"max_window_layers": 48, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None},
            output_router_logits=False,
        )
    ),
    "Mixtral-8x7B": Public(
        _of(
            "mixtral",
            "MixtralForCausalLM",
            _sizes(4096, 32, 14336, 32, 8, 32000, 32768, 1e6),
            **{"attention_dropout": 0.0, "num_experts_per_tok": 2, "num_local_experts": 8, "sliding_window": None},
            **{"output_router_logits": False, "router_aux_loss_coef": 0.02},
        )
    ),
    "DeepSeek-V3": Public(
        _deepseek(
            *(7168, 61, 18432, 128, 128, 129280, 163840, 1e4),
            **{"rms_norm_eps": 1e-6, "q_lora_rank": 1536, "moe_intermediate_size": 2048, "n_routed_experts": 256},
            **{"n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
            **{"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1},
            rope_scaling={
                **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32},
                **{"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        ),
        warned="code that comes with the weights",
    ),
    "Moonlight-16B-A3B": Public(
        _deepseek(
            *(2048, 27, 11264, 16, 16, 163840, 8192, 5e4),
            **{"q_lora_rank": None, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2},
            **{"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            **{"routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0, "rope_scaling": None},
        ),
        warned="code that comes with the weights",
    ),
    "internlm3-8b": Public(
        _other("internlm3", "InternLM3ForCausalLM", auto_map={"AutoModel": "code.Model"}), "biases of all projections"
    ),
    "MiMo-7B": Public(
        _other("mimo", "MiMoForCausalLM", auto_map={"AutoModel": "code.Model"}, num_nextn_predict_layers=1),
        "layers that predict several tokens",
    ),
    "MiniCPM-2B": Public(
        _other("minicpm", "MiniCPMForCausalLM", auto_map={"AutoModel": "code.Model"}, scale_emb=12), "multipliers of"
    ),
    "Llama-4-Scout": Public(_other("llama4", "Llama4ForConditionalGeneration"), "chunks of attention"),
}

_SMALL: dict[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 67,
}
_VISION = {
    **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14},
}


def shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same with small sizes, where heads share keys as they did, and ids of tokens that the vocabulary has."""
    if "text_config" in fields:
        several = "qwen" in fields["model_type"]
        vision = (VISION_OF_QWEN if several else _VISION) | {"model_type": fields["vision_config"]["model_type"]}
        tokens = {"mm_tokens_per_image": 4} if "mm_tokens_per_image" in fields else {}
        return dict(fields) | {"text_config": shrunk(fields["text_config"]), "vision_config": vision} | tokens
    groups = min(fields["num_attention_heads"] // fields["num_key_value_heads"], 4)
    small = dict(fields) | _SMALL | {"num_key_value_heads": 4 // groups, "initializer_range": 0.3}
    if "head_dim" in fields:
        small["head_dim"] = 16
    if "first_k_dense_replace" in fields:
        small["first_k_dense_replace"] = 1
    for name in ("layer_types", "no_rope_layers"):
        if name in fields:
            small[name] = fields[name][-_SMALL["num_hidden_layers"] :]
    if (small.get("rope_scaling") or {}).get("type") == "longrope":
        small["rope_scaling"] = _LONGROPE | {
            name: _LONGROPE[name][: int(8 * small.get("partial_rotary_factor", 1)) // 2]
            for name in ("short_factor", "long_factor")
        }
    if small["model_type"] == "deepseek_v3":
        chosen = 3 if small["n_group"] == 1 else 2 * small["topk_group"]
        small |= {"n_routed_experts": 4 * small["n_group"], "num_experts_per_tok": chosen, "first_k_dense_replace": 1}
        small |= {"moe_intermediate_size": 16, "kv_lora_rank": 20, "q_lora_rank": small["q_lora_rank"] and 12}
        small |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    if "linear_num_key_heads" in fields:
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        small |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6, "layer_types": _HYBRID[2:]}
    if "shared_expert_intermediate_size" in fields:
        small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        small |= {"shared_expert_intermediate_size": 16}
    if "hybrid_override_pattern" in fields:
        small |= {"hybrid_override_pattern": "M-*", "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2}
        small |= {"ssm_state_size": 6, "head_dim": 8, "num_hidden_layers": 3}
    if small["model_type"] in ("phi3", "smollm3", "glm4", "glm4_moe", "deepseek_v3"):
        small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return small
