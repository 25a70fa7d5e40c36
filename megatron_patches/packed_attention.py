"""Core attention over whole packed documents, as a megatron module: what runs where attention stays at home.

megatron's own DotProductAttention refuses packed documents. With this in its place and nothing else changed, unmodified
megatron-core trains on packed documents: the baseline, with the same kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from distca.attention import Kernel
from distca.ops.discard_output import forget_until_backward
from distca.runtime.timeline import Timeline
from megatron_patches.batch_context import PackedMicroBatch


class PackedAttention(MegatronModule):
    """Drop-in for DotProductAttention; ``kernel`` and ``timeline`` are set after the model is built."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.layer = layer_number - 1
        self.scale = score_scale(config)
        self.kernel: Kernel | None = None
        self.timeline: Timeline | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: PackedMicroBatch,
        **_: Any,
    ) -> torch.Tensor:
        """Attention inside each document.

        Args:
            query: [rows, 1, heads, head_dim].
            key: [rows, 1, kv_heads, head_dim].
            value: [rows, 1, kv_heads, head_dim].
            attention_mask: the micro-batch, which knows how its attention is computed.

        Returns:
            [rows, 1, heads · head_dim]; zero in padding rows.
        """
        assert self.kernel is not None and self.timeline is not None
        rows, padding = attention_mask.rows, len(query) - attention_mask.rows
        q, k, v = (x.squeeze(1)[:rows] for x in (query, key, value))
        timer = partial(self.timeline.serve, self.layer, 0)
        o = attention_mask.attend(self.kernel, q, k, v, self.scale, timer)
        if padding:
            padded = torch.nn.functional.pad(o, (0, 0, 0, 0, 0, padding))
            # The output projection keeps this copy, the kernel its o for backward: until then the copy does for both.
            forget_until_backward(o, partial(_fill_rows, padded.detach()), padded)
            o = padded
        return o.flatten(1).unsqueeze(1)


def score_scale(config: TransformerConfig) -> float:
    """The factor on attention scores."""
    return (config.kv_channels or 0) ** -0.5 if config.softmax_scale is None else config.softmax_scale


def _fill_rows(padded_NHD: torch.Tensor, out_NHD: torch.Tensor) -> None:
    out_NHD.copy_(padded_NHD[: len(out_NHD)])
