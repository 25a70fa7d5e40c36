"""The differences between a family's layers and LLaMA's, as data; needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The differences between a model's layers and LLaMA's. The folder that a run begins with brings them; the defaults
    are LLaMA's.

    Attributes:
        activation: activation of the MLP, or of its gate; gelu is approximated by tanh, relu2 is ReLU squared.
        gated: the MLP has a gate (Arcee's has none).
        normalization: RMSNorm, or LayerNorm without biases.
        zero_centered_norms: norms multiply by one plus their weight (Gemma).
        norms: pre = norms before attention and MLP, post = behind them (OLMo 2), both = before and behind (Gemma).
        query_key_norm: norms of queries and keys go over each head, or over the width of all heads together (OLMo 2).
        norm_after_rotation: these norms come behind the rotation (Hunyuan).
        parallel_mlp: attention and MLP read the same input, and both are added at once (Cohere).
        attention_output_bias: the projection behind attention has a bias.
        mlp_bias: the projections of the MLP have biases.
        score_scale: factor on attention scores; 0 takes one over the root of the head's width.
        score_softcap: limit c of attention scores s, which become c tanh(s / c); 0 for none (Gemma 2).
        rotary_percent: the part of each head that is rotated, from its first dimension.
        rotary_interleaved: neighbours in a head turn together, not its halves.
        unrotated_layers: numbers of layers, from 0, without rotary positions (SmolLM3).
        window_rope_base: rotary base of window layers, without scaling; 0 rotates them as all others (Gemma 3, OLMo 3).
        query_beta: queries at position p grow by 1 + query_beta ln(1 + floor(p / query_length)) (Ministral 3).
        query_length: tokens of the first context, within which queries stay as they are.
        embedding_scale: factor on embeddings (Gemma, Granite).
        residual_multiplier: factor on what attention and MLP add (Granite).
        logit_multiplier: factor on logits (Granite, Cohere).
        final_softcap: limit c of logits l, which become c tanh(l / c); 0 for none (Gemma 2).
    """

    activation: Literal["silu", "gelu", "relu2"] = "silu"
    gated: bool = True
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    zero_centered_norms: bool = False
    norms: Literal["pre", "both", "post"] = "pre"
    query_key_norm: Literal["head", "width"] = "head"
    norm_after_rotation: bool = False
    parallel_mlp: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    score_scale: float = 0.0
    score_softcap: float = 0.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    unrotated_layers: list[int] = field(default_factory=list)
    window_rope_base: float = 0.0
    query_beta: float = 0.0
    query_length: int = 0
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    final_softcap: float = 0.0

    @property
    def turns_alike(self) -> bool:
        """Positions turn all of every head, in all layers alike, and an attention factor on them is one on scores."""
        alike = self.rotary_percent == 1.0 and not self.unrotated_layers and not self.window_rope_base
        return alike and not self.norm_after_rotation  # such norms take a factor away again

    @property
    def own_layers(self) -> bool:
        """Megatron's own layers do not know it, so that ours run where attention is at home, too."""
        outside = {"score_softcap", "embedding_scale", "logit_multiplier", "final_softcap"}
        inside = {"activation", "gated", "normalization", "zero_centered_norms", "score_scale", "rotary_interleaved"}
        known = {name: getattr(self, name) for name in outside | inside}
        return replace(Variant(), **known) != self

    def problems(self, layers: int) -> list[str]:
        """Returns a sentence for each field that cannot work in a model of so many layers, beginning with the field's
        name."""
        found = []
        for name in ("score_scale", "score_softcap", "window_rope_base", "query_beta", "query_length", "final_softcap"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                found.append(f"{name} is {value:g}; it must be a number from 0 on.")
        for name in ("embedding_scale", "residual_multiplier", "logit_multiplier"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                found.append(f"{name} is {value:g}; it must be a number above 0.")
        if not 0 < self.rotary_percent <= 1:
            found.append(f"rotary_percent is {self.rotary_percent:g}; it must be above 0 and at most 1.")
        if bool(self.query_beta) != bool(self.query_length):
            found.append(
                f"query_beta is {self.query_beta:g} and query_length is {self.query_length}; set both, or neither."
            )
        others = [number for number in self.unrotated_layers if not 0 <= number < layers]
        if others:
            found.append(f"unrotated_layers has {others[0]}, but the model's layers are 0 to {layers - 1}.")
        return found + self._together()

    def _together(self) -> list[str]:
        found = []
        if self.query_key_norm == "width" and self.normalization == "LayerNorm":
            found.append(
                "query_key_norm is width, but normalization is LayerNorm, and one norm of all heads needs RMSNorm; set "
                "query_key_norm to head."
            )
        if self.norm_after_rotation and self.query_beta:
            found.append(
                f"query_beta is {self.query_beta:g}, but norms behind the rotation undo that growth of queries; set "
                "norm_after_rotation to false, or query_beta and query_length to 0."
            )
        if self.parallel_mlp and self.norms != "pre":
            found.append(
                f"norms is {self.norms}, but parallel_mlp is true, and such an MLP reads the norm before attention; "
                "set norms to pre, or parallel_mlp to false."
            )
        return found
