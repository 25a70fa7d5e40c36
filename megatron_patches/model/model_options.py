"""Settings of a model for which Megatron-Core's configuration has no field, such as a softcap of attention scores.

A training script gives them to ``distca.CAD(..., model_options=ModelOptions(...))``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from distca.models.rope import RopeScaling

Norms = Literal["pre", "both", "post"]
QueryKeyNorm = Literal["head", "width"]


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """RoPE of one layer.

    Attributes:
        base: base of the frequencies.
        scaling: scaling for contexts longer than in the model's first training.
        percent: share of each head's dimensions that RoPE rotates, beginning with dimension 0; from 0 to 1.
    """

    base: float
    scaling: RopeScaling = field(default_factory=RopeScaling)
    percent: float = 1.0


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """A factor on a query at position p of its document: 1 + beta ln(1 + floor(p / original_length)) (Ministral 3).

    Attributes:
        original_length: positions below this number have factor 1.
    """

    beta: float
    original_length: int


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options whose defaults are what Megatron does. Names in parentheses are models with other values.

    Attributes:
        score_softcap: softcap c of attention scores s, which become c tanh(s / c); 0 for none (Gemma 2: 50).
        rotations: RoPE of each layer, over all pipeline stages. A layer with None takes the model's rotary embedding,
            or has no RoPE if Megatron's ``no_rope_freq`` says so. An empty tuple means None for each layer.
        query_scaling: a factor on queries that grows with the position, or None (Ministral 3).
        norms: the places of a layer's norms. "pre": before attention and before the MLP. "post": on the outputs of
            attention and MLP, before the residual is added (OLMo 2). "both": in all four places (Gemma 2).
        query_key_norm: the elements that a norm of ``qk_layernorm`` normalises together. "head": the elements of one
            head. "width": the elements of all query heads, or of all key heads (OLMo 2).
        norm_after_rotation: whether the norms of ``qk_layernorm`` come after RoPE (Hunyuan), instead of before.
        attention_output_bias: whether attention's output projection has a bias although ``add_bias_linear`` is False.
        mlp_bias: whether both linear layers of the MLP have a bias although ``add_bias_linear`` is False.
        norm_bias: whether LayerNorms have biases (Cohere: no).
        parallel_mlp: whether the MLP reads the same input as attention, and both outputs are added to the residual
            (Cohere).
        embedding_scale: factor on embeddings (Gemma, Granite), rounded to the embeddings' dtype.
        residual_multiplier: factor on the outputs of attention and the MLP before they are added to the residual
            (Granite).
        logit_multiplier: factor on the logits (Cohere; Granite: 1 / ``logits_scaling``).
        final_softcap: softcap c of the logits l, which become c tanh(l / c) after ``logit_multiplier``; 0 for none
            (Gemma 2: 30).
        plain_recurrent_norm: whether the output norm of gated delta nets ignores ``layernorm_zero_centered_gamma``
            (Qwen3.5). With that field other norms multiply by 1 + w, and this norm by its weight w.
        step_min: the smallest step size (dt) of Mamba-2; 0 for no limit (Nemotron-H).
        latent_norm_epsilon: epsilon of latent attention's norms ``q_layernorm`` and ``kv_layernorm`` (DeepSeek-V3:
            1e-6). 0 takes the epsilon of the other norms.
    """

    score_softcap: float = 0.0
    rotations: tuple[Rotary | None, ...] = ()
    query_scaling: QueryScaling | None = None
    norms: Norms = "pre"
    query_key_norm: QueryKeyNorm = "head"
    norm_after_rotation: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = True
    parallel_mlp: bool = False
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    final_softcap: float = 0.0
    plain_recurrent_norm: bool = False
    step_min: float = 0.0
    latent_norm_epsilon: float = 0.0

    @property
    def own_layers(self) -> bool:
        """Whether Megatron's own layers cannot compute the options, so that the model needs this project's layers."""
        in_any_layers = ModelOptions(
            # These four act outside of layers or in core attention, so Megatron's layers can be used with them.
            score_softcap=self.score_softcap,
            embedding_scale=self.embedding_scale,
            logit_multiplier=self.logit_multiplier,
            final_softcap=self.final_softcap,
        )
        return self != in_any_layers


MEGATRONS = ModelOptions()
"""The options of a model that Megatron's configuration describes completely."""
