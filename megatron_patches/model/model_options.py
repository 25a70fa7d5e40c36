"""Options of a model that Megatron-Core's configuration has no field for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from distca.models.rope import RopeScaling

Norms = Literal["pre", "both", "post"]
QueryKeyNorm = Literal["head", "width"]


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The rotary positions of a layer.

    Attributes:
        base: base of the frequencies.
        scaling: scaling for contexts longer than the model was first trained on. Its attention factor multiplies the
            cosines and sines, since layers may have different factors.
        percent: the part of each head that is rotated, from its first dimension on; 1 is all of it.
    """

    base: float
    scaling: RopeScaling = field(default_factory=RopeScaling)
    percent: float = 1.0


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Queries grow with their position p in the document, by 1 + beta ln(1 + floor(p / original_length)), as those of
    Ministral 3 do.

    Attributes:
        beta: how fast they grow.
        original_length: tokens of the context at first, within which queries stay as they are.
    """

    beta: float
    original_length: int


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a model that Megatron-Core's configuration has no field for. The defaults are what Megatron does.

    Attributes:
        score_softcap: limit c of attention scores s, which become c tanh(s / c); 0 for none (Gemma 2: 50).
        rotations: the rotary positions of each layer of the whole model. A layer with None has GPTModel's, or no
            positions where Megatron's ``no_rope_freq`` says so. Empty where all layers have GPTModel's.
        query_scaling: how queries grow with their position; None where they do not.
        norms: where a layer's norms are. "pre": before attention and before the MLP. "post": behind each, before the
            residual is added (OLMo 2). "both": before and behind (Gemma 2).
        query_key_norm: the elements over which a norm of ``qk_layernorm`` goes. "head": each head by itself. "width":
            all query heads together, and all key heads (OLMo 2).
        norm_after_rotation: whether these norms come behind the rotation (Hunyuan), not before it.
        attention_output_bias: whether the output projection of attention has a bias while ``add_bias_linear`` is off.
        mlp_bias: whether both linear layers of the MLP have a bias while ``add_bias_linear`` is off.
        norm_bias: whether LayerNorms have biases (Cohere's do not).
        parallel_mlp: whether the MLP reads the input of attention, and both are added to the residual at once (Cohere).
        embedding_scale: factor on embeddings; the factor is rounded to their type (Gemma, Granite).
        residual_multiplier: factor on the outputs of attention and the MLP before they are added to the residual
            (Granite).
        logit_multiplier: factor on the logits (Cohere; one over Granite's ``logits_scaling``).
        final_softcap: limit c of the logits l, which become c tanh(l / c), after their factor; 0 for none (Gemma 2:
            30).
        plain_recurrent_norm: whether the norm of a gated delta net's heads multiplies by its weight, also with
            ``layernorm_zero_centered_gamma`` (Qwen3.5).
        step_min: smallest step size of Mamba-2 (Nemotron-H).
        latent_norm_epsilon: epsilon of the norms of latent rows; 0 for that of all norms (DeepSeek-V3's is 1e-6).
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
        """Whether Megatron's own layers cannot compute these options. Then ours also run where attention is at home."""
        layer = ModelOptions(
            # Layers need not know these: they work before or behind all layers, or in core attention.
            score_softcap=self.score_softcap,
            embedding_scale=self.embedding_scale,
            logit_multiplier=self.logit_multiplier,
            final_softcap=self.final_softcap,
        )
        return self != layer


MEGATRONS = ModelOptions()
"""The options of a model that Megatron's configuration describes completely."""
