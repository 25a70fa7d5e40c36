"""The shape of a model: its widths, and what each of its layers is; needs no torch.

Settings, Hugging Face folders, Megatron's model, the parity suite, the simulator and the prediction of memory all read
this one. A field that says what layers are is added to :class:`ModelShape`, and what it makes of each layer to
:attr:`ModelShape.layer_kinds`, where all others look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from distca.models.experts import Experts
from distca.models.hybrid import ATTENTION, EXPERTS, MLP, RECURRENT, Hybrid
from distca.models.latent import Latent
from distca.models.mlp import Mlp
from distca.models.rope import RopeScaling, yarn_magnitude
from distca.models.variant import Variant
from distca.plan.cost.linear import layer_weights
from distca.plan.cost.model import AttentionShape
from distca.plan.kinds import AttentionKind, usual_scale, windows_of

LayerType = Literal["full", "window"]


@dataclass(frozen=True)
class LayerKind:
    """The kind of one layer.

    Attributes:
        attention: which keys its queries see, and how scores become weights; None for a recurrent layer.
        mlp: what it computes behind attention.
        recurrent: the symbol of a recurrent layer; empty for attention.
    """

    attention: AttentionKind | None
    mlp: Mlp
    recurrent: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A LLaMA-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; and its variants.

    Attributes:
        layers: number of transformer layers; in a hybrid stack of its pattern's symbols, mixers and MLPs, as
            Megatron-Core's HybridModel counts. What holds for each layer with its MLP counts ``units``.
        hidden: width of the residual stream.
        ffn: width inside the MLP, in layers without experts.
        heads: query heads.
        kv_heads: key and value heads; they must divide heads.
        head_dim: width of one head; 0 means hidden / heads.
        vocabulary: token ids of the embedding and the output layer; 0 means the vocabulary of the data. Rows that
            tensor parallelism adds are never predicted.
        qkv_bias: the projections of q, k and v have a bias (Qwen2).
        qk_norm: RMSNorm of every query and key head before the rotation (Qwen3).
        rope_base: base of the rotary frequencies.
        norm_epsilon: epsilon of RMSNorm.
        layer_types: full or window for each layer, repeated over the layers: a token attends to its whole document up
            to itself, or to its last tokens.
        window: tokens that a token attends to in window layers, itself included.
        sinks: every head has a learned score without a value in its softmax (gpt-oss).
        tie_embeddings: the output layer uses the embedding's weights.
        rope_scaling: how rotary positions are stretched.
        variant: what its layers do differently from LLaMA's.
        experts: that layers have in place of the MLP.
        hybrid: recurrent layers beside those with attention.
        latent: keys and values that are expanded from narrow rows.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 0
    vocabulary: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_base: float = 500000.0
    norm_epsilon: float = 1e-5
    layer_types: list[LayerType] = field(default_factory=lambda: ["full"])
    window: int = 0
    sinks: bool = False
    tie_embeddings: bool = False
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    variant: Variant = field(default_factory=Variant)
    experts: Experts = field(default_factory=Experts)
    hybrid: Hybrid = field(default_factory=Hybrid)
    latent: Latent = field(default_factory=Latent)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer; in a hybrid stack of each mixer with the MLP that follows it."""
        scale, softcap = self.softmax_scale, self.variant.score_softcap
        if self.hybrid.pattern:
            full = AttentionKind(scale, 0, softcap, self.sinks)
            return tuple(
                LayerKind(None if recurrent else full, self._mlp(unit.mlp), recurrent)
                for unit in self.hybrid.units(self.layers)
                for recurrent in (unit.mixer if unit.mixer in RECURRENT else "",)
            )
        return tuple(
            LayerKind(AttentionKind(scale, window, softcap, self.sinks), mlp)
            for window, mlp in zip(self.windows, self._mlps, strict=True)
        )

    @property
    def units(self) -> int:
        """The mixers, attention or recurrent, each with the MLP that follows it; ``layers`` but in a hybrid stack."""
        return len(self.layer_kinds)

    @property
    def recurrent_layers(self) -> str:
        """The symbol of each recurrent layer."""
        return "".join(kind.recurrent for kind in self.layer_kinds)

    @property
    def _mlps(self) -> list[Mlp]:
        """The MLP of each layer."""
        dense = min(self.experts.dense_layers, self.layers) if self.experts.count else self.layers
        return [self._mlp(MLP)] * dense + [self._mlp(EXPERTS)] * (self.layers - dense)

    def _mlp(self, symbol: str) -> Mlp:
        if symbol == EXPERTS:
            return Mlp(self.experts.shared_ffn, experts=self.experts)
        return Mlp(self.ffn if symbol else 0, self.variant.gated)

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The kind of attention of each layer that has it."""
        return tuple(kind.attention for kind in self.layer_kinds if kind.attention is not None)

    @property
    def windows(self) -> tuple[int, ...]:
        """The number of tokens that a token attends to in each layer with attention; 0 for its whole document up to
        itself."""
        if self.hybrid.pattern:
            return (0,) * self.hybrid.symbols(self.layers).count(ATTENTION)
        return windows_of(self.layer_types or ["full"], self.window, self.layers)

    @property
    def resolved_head_dim(self) -> int:
        """Width of a head of queries and keys: head_dim, or hidden // heads where it is 0."""
        if self.latent.kv_rank:
            return self.latent.head_dim
        return self.head_dim or self.hidden // max(self.heads, 1)

    @property
    def value_dim(self) -> int:
        """Width of a head of values and of attention's output."""
        return self.latent.value_dim if self.latent.kv_rank else self.resolved_head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the part of each head that positions may turn."""
        return self.latent.rotary_dim if self.latent.kv_rank else self.resolved_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the products of queries and keys. An attention factor on queries and on keys is its square on
        scores, unless each layer turns by itself, with the factor in its angles."""
        if self.latent.kv_rank:
            magnitude = yarn_magnitude(self.rope_scaling.factor, self.latent.score_magnitude)
            return magnitude**2 * usual_scale(self.resolved_head_dim)
        factor = self.rope_scaling.resolved_attention_factor if self.variant.turns_alike else 1.0
        return factor**2 * (self.variant.score_scale or usual_scale(self.resolved_head_dim))

    def attention_shape(self, tp: int = 1, value_bytes: int = 2) -> AttentionShape:
        """Attention heads of one of ``tp`` tensor-parallel ranks, which must divide them."""
        narrow = self.value_dim if self.value_dim < self.resolved_head_dim else 0
        return AttentionShape(self.heads // tp, self.kv_heads // tp, self.resolved_head_dim, value_bytes, narrow)

    @property
    def attention_weights(self) -> tuple[int, int]:
        """Weights of a layer's product before core attention (q, k, v) and of the one behind it (output)."""
        output = self.hidden * self.heads * self.value_dim
        if self.latent.kv_rank:
            return self.latent.inner_weights(self.hidden, self.heads), output
        inner = layer_weights(self.hidden, 0, self.heads, self.kv_heads, self.resolved_head_dim) - output
        return inner + output * self.hybrid.output_gate, output

    def mixer_weights(self, kind: LayerKind) -> int:
        """Weights of the products of a layer's attention or recurrent part."""
        return self.hybrid.weights(kind.recurrent, self.hidden) if kind.recurrent else sum(self.attention_weights)

    @property
    def matmul_weights(self) -> int:
        """Weights of all layers that a token is multiplied by, of experts only its own; no embedding and no output
        layer."""
        return sum(self.mixer_weights(kind) + kind.mlp.weights(self.hidden) for kind in self.layer_kinds)

    @property
    def held_weights(self) -> int:
        """Weights of all layers, of all experts; no embedding and no output layer."""
        return sum(self.mixer_weights(kind) + kind.mlp.held(self.hidden) for kind in self.layer_kinds)

    @property
    def mlp_weights(self) -> int:
        """Weights of a unit's MLP that a token is multiplied by, in the mean over units."""
        return sum(kind.mlp.weights(self.hidden) for kind in self.layer_kinds) // self.units

    @property
    def layer_weights(self) -> int:
        """Weights of a unit that a token is multiplied by, in the mean over units."""
        return self.matmul_weights // self.units

    @property
    def replicated_weights(self) -> int:
        """Weights of a unit that every tensor-parallel rank has all of, in the mean over units: of routers, and of
        projections to latent rows."""
        routers = sum(kind.mlp.router(self.hidden) for kind in self.layer_kinds) // self.units
        return routers + self.latent.replicated_weights(self.hidden)

    @property
    def routed_weights(self) -> int:
        """Weights of a unit's experts that a token goes to, in the mean over units; part of ``mlp_weights``."""
        return sum(kind.mlp.routed(self.hidden) for kind in self.layer_kinds) // self.units
