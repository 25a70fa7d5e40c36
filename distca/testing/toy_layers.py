"""A tiny stack of split layers without megatron, and the same computation on whole documents by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca.plan import AttentionKind
from distca.testing.reference_attention import packed_attention


@dataclass
class ToyLayer:
    """hidden → q, k, v by matrices; hidden + o · matrix. Weights are leaves of the autograd graph.

    Attributes:
        qkv: [width, (heads + 2 · kv_heads) · head_dim].
        out: [heads · head_dim, width].
        heads: query heads.
        kv_heads: key/value heads.
        kind: of core attention.
        sink: [heads] of a kind with sinks.
    """

    qkv: torch.Tensor
    out: torch.Tensor
    heads: int
    kv_heads: int
    kind: AttentionKind
    sink: torch.Tensor | None = None

    @property
    def head_dim(self) -> int:
        return self.out.shape[0] // self.heads

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed = (torch.tanh(hidden) @ self.qkv).unflatten(1, (-1, self.head_dim))
        q, kv = mixed.split((self.heads, 2 * self.kv_heads), dim=1)
        return hidden, q, kv.unflatten(1, (2, self.kv_heads))

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        (hidden,) = residual
        return hidden + o_NHD.flatten(1) @ self.out

    def whole(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """The layer on whole packed documents."""
        _, q, kv = self.pre(hidden, 0)
        return self.post(packed_attention(q, kv[:, 0], kv[:, 1], lengths, self.kind, self.sink), hidden, nano=0)


def toy_layers(
    count: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seed: int,
    kinds: Sequence[AttentionKind] = (),
) -> list[ToyLayer]:
    """``count`` layers with seeded float64 weights that require gradients, of ``kinds``, or all without a window."""
    kinds = kinds or [AttentionKind(head_dim**-0.5)] * count
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) / rows**0.5).requires_grad_()

    return [
        ToyLayer(
            weight(width, (heads + 2 * kv_heads) * head_dim),
            weight(heads * head_dim, width),
            heads,
            kv_heads,
            kind,
            weight(1, heads).detach()[0].requires_grad_() if kind.sink else None,
        )
        for kind in kinds
    ]
