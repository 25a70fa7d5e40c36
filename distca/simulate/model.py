"""The shape of a simulated model: a dense decoder with grouped-query attention and SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

from distca.plan import AttentionShape
from distca.plan.cost.model import layer_weights
from distca.simulate.errors import SimulationError


@dataclass(frozen=True)
class Model:
    """Sizes of the whole model.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream.
        ffn: width of the MLP.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: size of a head.
        vocabulary: rows of embedding and output layer.
        tied: without pipeline stages these two are one table.

    Raises:
        SimulationError: on a size below 1.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 128_256
    tied: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "tied" and value < 1:
                raise SimulationError(f"`{name}` is {value}; it must be at least 1.")

    def shape(self, tp: int) -> AttentionShape:
        """Attention heads of one of ``tp`` tensor-parallel ranks, in bfloat16.

        Raises:
            SimulationError: ``tp`` does not divide the heads, or the widths that are shared out.
        """
        if self.kv_heads % tp or self.heads % tp:
            raise SimulationError(
                f"`tp` is {tp}, which does not divide the {self.heads} query heads and {self.kv_heads} key/value "
                "heads; choose one that does."
            )
        for name in ("hidden", "ffn"):
            if getattr(self, name) % tp:
                raise SimulationError(
                    f"`tp` is {tp}, which does not divide the model's {name} of {getattr(self, name)}; choose one that "
                    "does."
                )
        return AttentionShape(self.heads // tp, self.kv_heads // tp, self.head_dim)

    @property
    def attention_weights(self) -> tuple[int, int]:
        """Weights of the product before core attention (q,k,v) and of the one behind it (output)."""
        width = self.heads * self.head_dim
        return self.hidden * (width + 2 * self.kv_heads * self.head_dim), self.hidden * width

    @property
    def mlp_weights(self) -> int:
        """Weights of gate, up and down."""
        return 3 * self.hidden * self.ffn

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's matrix products."""
        return layer_weights(self.hidden, self.ffn, self.heads, self.kv_heads, self.head_dim)


MODELS = {
    "8b": Model(32, 4096, 14336, 32, 8),
    "34b": Model(48, 8192, 22016, 64, 16),
}
"""Shapes by name, those of ``configs/``."""
