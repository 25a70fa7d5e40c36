"""The shapes of models that ``distca simulate`` knows by name, and checks of a model's sizes."""

from __future__ import annotations

from typing import Any

from distca.errors import SimulationError
from distca.models.experts import Experts
from distca.models.hybrid import Hybrid
from distca.models.latent import Latent
from distca.models.shape import ModelShape
from distca.plan import AttentionShape


def dense(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    vocabulary: int = 128_256,
    **more: Any,
) -> ModelShape:
    """Returns the shape of a model; the default vocabulary is LLaMA 3's. ``more`` are further fields of ModelShape."""
    return ModelShape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        **more,
    )


def heads_of_rank(model: ModelShape, tp: int) -> AttentionShape:
    """Returns the attention heads of one of ``tp`` tensor-parallel ranks, in bfloat16.

    Raises:
        SimulationError: a size is below 1 or a window below 0; the pattern of recurrent layers is impossible; or ``tp``
            does not divide heads or widths.
    """
    for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "resolved_head_dim", "vocabulary"):
        if getattr(model, name) < 1:
            size = name.removeprefix("resolved_")
            raise SimulationError(f"The model's {size} is {getattr(model, name)}; it must be at least 1.")
    if wrong := model.hybrid.problems(model.layers):
        raise SimulationError(f"The model's hybrid stack cannot be: its {wrong[0]}")
    if min(model.windows) < 0:
        raise SimulationError(f"The model's window is {model.window}; it must be 0 or more.")
    if model.kv_heads % tp or model.heads % tp:
        raise SimulationError(
            f"`tp` is {tp}, which does not divide the {model.heads} query heads and {model.kv_heads} key/value "
            "heads; choose one that does."
        )
    if model.recurrent_layers and model.hybrid.key_heads % tp:
        raise SimulationError(
            f"`tp` is {tp}, which does not divide the {model.hybrid.key_heads} key heads of recurrent layers; choose "
            "one that does."
        )
    dense = any(not kind.mlp.experts.count for kind in model.layer_kinds)
    for name in ("hidden", "ffn") if dense else ("hidden",):
        if getattr(model, name) % tp:
            raise SimulationError(
                f"`tp` is {tp}, which does not divide the model's {name} of {getattr(model, name)}; choose one that "
                "does."
            )
    return model.attention_shape(tp)


def _windowed(window: int, windowed: int) -> dict[str, Any]:
    """Returns the fields of a model in which one layer without a window follows ``windowed`` layers with one."""
    return {"layer_types": ["window"] * windowed + ["full"], "window": window}


def _experts(count: int, topk: int, ffn: int, **more: Any) -> dict[str, Any]:
    """Returns the fields of a model with ``count`` experts of width ``ffn``, of which each row goes to ``topk``."""
    return {"experts": Experts(count=count, topk=topk, ffn=ffn, **more)}


def _qwen35(layers: int, hidden: int, ffn: int, heads: int, value_heads: int) -> ModelShape:
    """Returns the shape of a dense Qwen3.5 model. ``layers`` are counted as in its folder, each with its MLP."""
    net = Hybrid(pattern="G-G-G-*-", key_heads=16, value_heads=value_heads, output_gate=True)
    return dense(2 * layers, hidden, ffn, heads, 4, 256, 248_320, qk_norm=True, hybrid=net)


MODELS = {
    "8b": dense(32, 4096, 14336, 32, 8),
    "34b": dense(48, 8192, 22016, 64, 16),
    "gemma-3-like": dense(
        *(48, 3840, 15360, 16, 8, 256, 262_144), tie_embeddings=True, qk_norm=True, **_windowed(1024, 5)
    ),
    "gpt-oss-like": dense(24, 2880, 11520, 64, 8, 64, 201_088, sinks=True, **_windowed(128, 1)),
    "qwen3-30b-a3b": dense(48, 2048, 6144, 32, 4, 128, 151_936, qk_norm=True, **_experts(128, 8, 768)),
    "qwen3-235b-a22b": dense(94, 4096, 12288, 64, 4, 128, 151_936, qk_norm=True, **_experts(128, 8, 1536)),
    "mixtral-8x7b": dense(32, 4096, 14336, 32, 8, 128, 32_000, **_experts(8, 2, 14336)),
    "moonlight-16b-a3b": dense(
        *(27, 2048, 11264, 16, 16, 0, 163_840),
        latent=Latent(kv_rank=512),
        **_experts(64, 6, 1408, dense_layers=1, shared_ffn=2816, score="sigmoid", bias=True, scale=2.446),
    ),
    "deepseek-v3": dense(
        *(61, 7168, 18432, 128, 128, 0, 129_280),
        latent=Latent(kv_rank=512, q_rank=1536),
        **_experts(256, 8, 2048, dense_layers=3, shared_ffn=2048, score="sigmoid", bias=True, scale=2.5),
    ),
    "qwen3.5-9b": _qwen35(32, 4096, 12288, 16, 32),
    "qwen3.5-27b": _qwen35(64, 5120, 17408, 24, 48),
    "olmo-3-like": dense(64, 5120, 27648, 40, 8, 128, 100_352, **_windowed(4096, 3)),
}
"""Shapes by name, as in ``configs/``. Shapes of Qwen3, Qwen3.5, Mixtral, Moonlight and DeepSeek-V3 are from their
public folders. olmo-3-like has the sizes and windows of OLMo 3 32B, but the norms of LLaMA. A configuration file with
its own norms (``qk_norm``, ``variant.norms`` post) is predicted to need more memory."""
