"""Tiny models of transformers, at least one of each served family, with random weights, saved as folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.dense_gpt_oss import without_experts

Tensors = dict[str, torch.Tensor]

ORIGINAL, LENGTHS, VOCABULARY = 16, (5, 23, 40, 61), 67
"""Documents go beyond the original context of every scaling, and the vocabulary is odd."""

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
}


def _rope(kind: str, base: float = 10000.0, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **fields}}


_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 11,
    "sliding_window": 7,
}
_SMOL = {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 0],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN_HYBRID = {
    **{"num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 6},
}
_PHI = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _longrope(frequencies: int, **fields: Any) -> dict[str, Any]:
    short, long = ([1.0 + step * number for number in range(frequencies)] for step in (0.1, 2.0))
    rope = _rope("longrope", 100.0, short_factor=short, long_factor=long, **fields)
    return {"original_max_position_embeddings": ORIGINAL, **rope}


def _kinds(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "full_attention": {"rope_type": kind, "rope_theta": 1000.0, **fields},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }


_DEEPSEEK = {
    **{"num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 12, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 12, "n_group": 3, "topk_group": 2},
    **{"num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 1.7, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


# Name: (class in transformers, fields that differ).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, own base and wide heads": ("Llama", {"head_dim": 16, **_rope("default", 1234.5)}),
    "llama, every head its own keys, tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama3": ("Llama", _rope("llama3", 500.0, **_LLAMA3)),
    "linear": ("Llama", _rope("linear", factor=4.0)),
    "dynamic": ("Llama", {"max_position_embeddings": ORIGINAL, **_rope("dynamic", 100.0, factor=2.0)}),
    "yarn": ("Llama", _rope("yarn", 100.0, **_YARN)),
    "yarn, all fields": (
        "Llama",
        _rope("yarn", 100.0, **_YARN, attention_factor=1.3, beta_fast=4.0, beta_slow=0.5, truncate=False),
    ),
    "yarn, two magnitudes": ("Llama", _rope("yarn", 100.0, **_YARN, mscale=1.5, mscale_all_dim=0.5)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True, "sliding_window": 8}),
    "qwen3": ("Qwen3", {"head_dim": 16, **_rope("yarn", 1000.0, **_YARN)}),
    "mistral, windows": ("Mistral", {"sliding_window": 7}),
    "qwen2, windows in later layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "ministral": (
        "Ministral",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    ),
    "phi3": ("Phi3", _PHI),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_dropout": 0.1, "residual_dropout": 0.1}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {**_GEMMA, "num_hidden_layers": 6, "rope_parameters": _kinds("linear", factor=8.0)}),
    "olmo2": ("Olmo2", _rope("yarn", 100.0, **_YARN)),
    "olmo3": ("Olmo3", {"sliding_window": 6, "num_hidden_layers": 4, "rope_parameters": _kinds("yarn", **_YARN)}),
    "smollm3": ("SmolLM3", {**_SMOL, **_rope("yarn", 100.0, **_YARN)}),
    "smollm3, windows": ("SmolLM3", {**_SMOL, "use_sliding_window": True, "sliding_window": 9}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": ("Ministral3", {"head_dim": 16, **_rope("yarn", 100.0, **_YARN, llama_4_scaling_beta=0.3)}),
    "cohere2": (
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": 7, "sliding_window_pattern": 2, **_rope("yarn", 100.0, **_YARN)},
    ),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 7, **_rope("llama3", 500.0, **_LLAMA3)}),
    "exaone4, no windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 1}),
    "mistral3": ("Mistral3", {"sliding_window": None, "head_dim": 16}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True, **_rope("linear", 100.0, factor=4.0)}),
    "hunyuan": (
        "HunYuanDenseV1",
        {"head_dim": 16, "attention_bias": True, **_rope("dynamic", 100.0, factor=1.0, alpha=50.0)},
    ),
    "arcee": ("Arcee", _rope("yarn", 100.0, **_YARN)),
    "arcee, biases": ("Arcee", {"attention_bias": True, "mlp_bias": True}),
    "phi4_mini": ("Phi3", _PHI | {"tie_word_embeddings": True, **_longrope(3, partial_rotary_factor=0.75)}),
    "phi3, longrope": ("Phi3", _PHI | _longrope(4)),
    "gemma3 with images": (
        "Gemma3",
        {**_GEMMA, "num_hidden_layers": 6, "rope_parameters": _kinds("linear", factor=8.0)},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **{"num_hidden_layers": 3, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [0]},
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 1}),
    "gpt_oss, dense": (
        "GptOss",
        {
            **{"num_hidden_layers": 4, "num_local_experts": 0, "head_dim": 16, "sliding_window": 7},
            **_rope("yarn", 1000.0, **_YARN | {"factor": 32.0}, truncate=False),
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7},
            **{
                "intermediate_size": 64,
                "swiglu_limit": 1.5,
                **_rope("yarn", 1000.0, **_YARN | {"factor": 32.0}, truncate=False),
            },
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **{"num_hidden_layers": 3, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "n_group": 3},
            **{"topk_group": 2, "n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 24},
            **{"n_shared_experts": 2, "routed_scaling_factor": 1.7, "pad_token_id": 0, "eos_token_id": 1},
        },
    ),
    "qwen3_5": ("Qwen3_5Text", _QWEN_HYBRID | _rope("default", 1000.0, partial_rotary_factor=0.5)),
    "qwen3_5 with images, tied": (
        "Qwen3_5",
        _QWEN_HYBRID
        | {"layer_types": ["full_attention", "linear_attention"] * 2, "tie_word_embeddings": True}
        | _rope("default", 1000.0, mrope_interleaved=True, mrope_section=[1, 1, 0]),
    ),
}
CASES["nemotron_h"] = (
    "NemotronH",
    {
        **{"layers_block_type": ["mamba", "mlp", "mamba", "attention"] * 2, "head_dim": 16},
        **{"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "time_step_min": 0.3},
    },
)
_QWEN_EXPERTS = _QWEN_HYBRID | {
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
}
CASES |= {"qwen3_5_moe": ("Qwen3_5MoeText", _QWEN_EXPERTS), "qwen3_next": ("Qwen3Next", _QWEN_EXPERTS)}
FUSED = {f"{name}, fused": name for name in ("mixtral", "glm4_moe", "qwen3_5_moe")}
"""Cases whose folders have all experts of a layer in one tensor, as version 5 has them in memory, and what they are."""
PACKED = {"gpt_oss, mxfp4": "gpt_oss"}
"""Cases whose experts are numbers of MXFP4, stored as such, and what they are."""
CASES |= {name: CASES[case] for name, case in (FUSED | PACKED).items()}
CASES |= {
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK | _rope("yarn", 100.0, **_YARN, mscale=1.0, mscale_all_dim=1.0)),
    "moonlight": (
        "DeepseekV3",
        {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
    ),
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}


VISION_OF_QWEN = {
    **{"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
    **{"patch_size": 14, "num_position_embeddings": 4},
}


def write_folder(name: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "40KB") -> Any:
    """Write a case's folder, in several files, and return its model."""
    import transformers

    kind, fields = CASES[name]
    torch.manual_seed(list(CASES).index(name))
    made = SIZES | fields
    if kind == "Mistral3":
        made = {"text_config": made | {"model_type": "mistral"}, "vision_config": VISION, "tie_word_embeddings": False}
    if kind == "Gemma3":
        made = {"text_config": made, "vision_config": VISION | {"model_type": "siglip_vision_model"}}
        made["mm_tokens_per_image"] = 4
    if kind == "Qwen3_5":
        made = {
            "text_config": made,
            "vision_config": VISION_OF_QWEN,
            "tie_word_embeddings": made["tie_word_embeddings"],
        }
    if kind == "NemotronH":
        made["layer_norm_epsilon"] = made.pop("rms_norm_eps")
    if kind == "Cohere2":
        made["layer_norm_eps"] = made.pop("rms_norm_eps")
    config = getattr(transformers, f"{kind}Config")(**made)
    head = "ConditionalGeneration" if "vision_config" in made else "CausalLM"
    with without_experts():
        model = getattr(transformers, f"{kind.removesuffix('Text')}For{head}")(config).eval()
    _fill_padding(model)
    disturb(model)
    _steady(model)
    packed = _pack(model) if name in PACKED else {}
    model.to(dtype).save_pretrained(folder, max_shard_size=shard, save_original_format=name not in FUSED)
    if packed:
        _rewrite(folder, lambda tensors: _replaced(tensors, packed))
        _say_packed(folder)
    if kind in ("Glm4Moe", "DeepseekV3"):
        further = {f"model.layers.{made['num_hidden_layers']}.eh_proj.weight": torch.randn(4, 8).to(dtype)}
        _rewrite(folder, lambda tensors: _as_published(tensors, further))
    if kind.startswith(("Qwen3_5", "NemotronH")):
        further = {"mtp.fc.weight": torch.randn(4, 8).to(dtype)}
        _rewrite(folder, lambda tensors: tensors | (further if any("embed" in name for name in tensors) else {}))
    return model


def _as_published(tensors: Tensors, further: Tensors) -> Tensors:
    """Tensors with what published folders of GLM-4.5 and DeepSeek-V3 have, and transformers does not write: biases of
    routers in float32, and beside the last norm the layer that predicts further tokens."""
    biases = {name: each.float() for name, each in tensors.items() if name.endswith("e_score_correction_bias")}
    return tensors | biases | (further if "model.norm.weight" in tensors else {})


def _pack(model: Any) -> dict[str, Tensors]:
    """Give all experts random numbers of MXFP4; returns, by the tensor that they stand for, how they are stored."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = {}
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = weight.shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, blocks.shape[:-1], dtype=torch.uint8)
            packed[name] = {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                weight.copy_(convert_moe_packed_tensors(blocks, scales))
    return packed


def _replaced(tensors: Tensors, packed: dict[str, Tensors]) -> Tensors:
    kept = {name: tensor for name, tensor in tensors.items() if name not in packed}
    return kept | {part: each for name in tensors for part, each in packed.get(name, {}).items()}


def _say_packed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Change the tensors of each of a folder's files, and its index."""
    from safetensors.torch import load_file, save_file

    file_of: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = change(load_file(file))
        save_file(tensors, file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, file.name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}), encoding="utf-8")


def _fill_padding(model: Any) -> None:
    """Give the padding token an embedding that is trained as all others are; transformers makes it zero, and gives it
    no gradient where it is looked up."""
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is not None:
        with torch.no_grad():
            embedding.weight[embedding.padding_idx].normal_(std=SIZES["initializer_range"])
        embedding.padding_idx = None


def disturb(model: Any) -> None:
    """Move norms from one and biases from zero, where a wrong place would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):  # those of all experts lie in one tensor
                parameter += 0.3 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn_like(buffer)


def _steady(model: Any) -> None:
    """Let rounding grow little in models with recurrent layers: of gradients that are differences of large numbers
    float32 leaves few digits, in transformers too. So decays are slow, and the residual stream is larger than what
    layers add."""
    with torch.no_grad():
        decays = [parameter for name, parameter in model.named_parameters() if name.endswith("A_log")]
        for each in decays:
            each.uniform_(-4.0, -1.5)
        if decays:
            model.get_input_embeddings().weight.normal_()


def documents(seed: int = 1) -> list[list[int]]:
    """Seeded tokens of documents of all lengths, the shortest first."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def logits(model: Any) -> list[torch.Tensor]:
    """[length, vocabulary] of every document alone. Dynamic scaling remembers the longest so far, so they grow."""
    with torch.no_grad():
        return [model(torch.tensor([document])).logits[0] for document in documents()]


def loaded(folder: Path) -> Any:
    """The model that transformers makes of a folder, in float32."""
    import transformers

    several = '"vision_config"' in (folder / "config.json").read_text(encoding="utf-8")
    kind = transformers.AutoModelForImageTextToText if several else transformers.AutoModelForCausalLM
    with without_experts():
        return kind.from_pretrained(folder, dtype=torch.float32).eval()
