"""The shape of a simulated model: a dense decoder with grouped-query attention and SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

from distca.plan import AttentionKind, AttentionShape
from distca.plan.cost.linear import layer_weights
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
        windows: keys that a query sees, its own included, of each layer from the first on, again where there are more
            layers; 0 for all.
        sinks: every head has a learned score without a value.

    Raises:
        SimulationError: on a size below 1, or a window below 0.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 128_256
    tied: bool = False
    windows: tuple[int, ...] = (0,)
    sinks: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("tied", "windows", "sinks") and value < 1:
                raise SimulationError(f"`{name}` is {value}; it must be at least 1.")
        if not self.windows or min(self.windows) < 0:
            raise SimulationError(f"`windows` is {list(self.windows)}; give one or more, of 0 for all keys, or more.")

    @property
    def kinds(self) -> list[AttentionKind]:
        """By layer, the kind of its attention."""
        windows = [self.windows[layer % len(self.windows)] for layer in range(self.layers)]
        return [AttentionKind(self.head_dim**-0.5, window, sink=self.sinks) for window in windows]

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
    "gemma-3-like": Model(48, 3840, 15360, 16, 8, 256, 262_144, tied=True, windows=(1024,) * 5 + (0,)),
    "gpt-oss-like": Model(24, 2880, 11520, 64, 8, 64, 201_088, windows=(128, 0), sinks=True),
    "olmo-3-like": Model(64, 5120, 27648, 40, 8, 128, 100_352, windows=(4096,) * 3 + (0,)),
}
"""Shapes by name, those of ``configs/``; olmo-3-like is OLMo 3 32B's."""
