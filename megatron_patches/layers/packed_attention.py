"""Core attention, softmax(QKᵀ)V, inside each of several packed documents, as a module for Megatron's layers.

The forward runs if each rank computes the attention of its own documents, for example with
``distca.CAD(disaggregate=False)``. If ranks compute attention for each other, this module only holds the learned
sinks, if any.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from distca.attention import Kernel
from distca.ops.recomputed import forget_until_backward
from distca.runtime.timeline import Timeline
from megatron_patches.model.layer_kinds import kind_of_layer
from megatron_patches.steps.batch_context import PackedMicroBatch


class PackedAttention(MegatronModule):
    """Takes the place of Megatron's DotProductAttention, which refuses packed documents.

    Attributes:
        layer: the layer's number in the whole model, from 0.
        kind: which keys a query attends to in this layer, and how scores are scaled; ``CAD.attach`` sets its softcap.
        softmax_offset: [this rank's heads] the learned sinks, or None. A sink is one more score in a head's softmax; no
            value row belongs to it.
        kernel, timeline: the attention kernel, and the recorder of its time; set by ``CAD.attach``.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.layer = layer_number - 1
        self.kind = kind_of_layer(config, layer_number)
        self.softmax_offset: torch.nn.Parameter | None = None
        if self.kind.sink:
            self.softmax_offset = self._sinks(config)
        self.kernel: Kernel | None = None
        self.timeline: Timeline | None = None

    @staticmethod
    def _sinks(config: TransformerConfig) -> torch.nn.Parameter:
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            assert config.init_method is not None
            with tensor_parallel.get_cuda_rng_tracker().fork():  # tensor-parallel ranks draw different numbers here
                config.init_method(sinks)
        tensor_parallel.set_tensor_model_parallel_attributes(sinks, True, 0, 1)
        return sinks

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        sinks = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            sinks, prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return found

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: PackedMicroBatch,
        **_: Any,
    ) -> torch.Tensor:
        """Returns [rows, 1, heads · value width] attention inside each document; zero in padding rows.

        The value width is head_dim, or less in latent attention.

        Args:
            query: [rows, 1, heads, head_dim].
            key: [rows, 1, kv_heads, head_dim].
            value: [rows, 1, kv_heads, value width].
            attention_mask: the micro-batch; rows beyond ``attention_mask.rows`` are padding.
        """
        assert self.kernel is not None and self.timeline is not None
        rows, padding = attention_mask.rows, len(query) - attention_mask.rows
        q, k, v = (x.squeeze(1)[:rows] for x in (query, key, value))
        timer = partial(self.timeline.serve, self.layer, 0)  # 0: the micro-batch is not split
        o = attention_mask.attend(self.kernel, q, k, v, self.kind, timer, self.softmax_offset)
        if padding:
            padded = torch.nn.functional.pad(o, (0, 0, 0, 0, 0, padding))
            # The output projection keeps ``padded`` for backward, and the kernel keeps ``o``. So the memory of ``o`` is
            # freed here, and backward copies ``o`` back from ``padded``.
            forget_until_backward(o, partial(_fill_rows, padded.detach()), padded)
            o = padded
        return o.flatten(1).unsqueeze(1)


def _fill_rows(padded: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(padded[: len(out)])
