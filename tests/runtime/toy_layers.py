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
        qkv: [width, (heads + kv_heads) · head_dim + kv_heads · value_dim].
        out: [heads · value_dim, width].
        heads: query heads.
        kv_heads: key/value heads.
        kind: of core attention.
        head_dim: elements of a head of queries and keys; values have their own width.
        sink: [heads] of a kind with sinks.
    """

    qkv: torch.Tensor
    out: torch.Tensor
    heads: int
    kv_heads: int
    kind: AttentionKind
    head_dim: int
    sink: torch.Tensor | None = None

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed = torch.tanh(hidden) @ self.qkv
        of_q, of_k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = mixed.tensor_split((of_q, of_q + of_k), dim=1)
        q, k, v = q.unflatten(1, (self.heads, -1)), *(x.unflatten(1, (self.kv_heads, -1)) for x in (k, v))
        return hidden, q, torch.stack((k, v), dim=1) if k.shape == v.shape else torch.cat((k, v), dim=-1)

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        (hidden,) = residual
        return hidden + o_NHD.flatten(1) @ self.out

    def whole(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """The layer on whole packed documents."""
        _, q, kv = self.pre(hidden, 0)
        k, v = kv.unbind(1) if kv.dim() == 4 else (kv[..., : self.head_dim], kv[..., self.head_dim :])
        return self.post(packed_attention(q, k, v, lengths, self.kind, self.sink), hidden, nano=0)


def toy_layers(
    count: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seed: int,
    kinds: Sequence[AttentionKind] = (),
    value_dim: int = 0,
) -> list[ToyLayer]:
    """``count`` layers with seeded float64 weights that require gradients, of ``kinds``, or all without a window.

    Values are as wide as keys unless ``value_dim`` says otherwise.
    """
    value_dim = value_dim or head_dim
    kinds = kinds or [AttentionKind(head_dim**-0.5)] * count
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) / rows**0.5).requires_grad_()

    return [
        ToyLayer(
            weight(width, (heads + kv_heads) * head_dim + kv_heads * value_dim),
            weight(heads * value_dim, width),
            heads,
            kv_heads,
            kind,
            head_dim,
            weight(1, heads).detach()[0].requires_grad_() if kind.sink else None,
        )
        for kind in kinds
    ]
