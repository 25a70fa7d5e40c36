"""The output layer and its cross-entropy, a few thousand rows at a time.

The logits of 128K tokens over a vocabulary of 128K are 33 GB in bfloat16, and megatron's cross-entropy keeps them in
float32 twice more. Here each chunk's logits are computed, reduced to losses and dropped; backward computes them again,
at the price of one more output-layer matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel

# float32 logits of one chunk on one tensor-parallel rank.
_CHUNK_BYTES = 1 << 30


class ChunkedLossGPTModel(GPTModel):
    """GPTModel whose loss never holds all logits; :func:`chunk_loss` turns a model into one."""

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        labels = kwargs.get("labels")
        vocabulary = self.vocab_size // self.config.tensor_model_parallel_size
        rows = max(_CHUNK_BYTES // (4 * vocabulary), 1)
        if not self.post_process or labels is None or labels.shape[1] <= rows:
            return super()._postprocess(hidden_states, *args, **kwargs)
        return self._losses(hidden_states, labels, rows)

    def _losses(self, hidden_states: torch.Tensor, labels: torch.Tensor, rows: int) -> torch.Tensor:
        """[1, rows] losses.

        Under sequence parallelism hidden_states holds this rank's share; a chunk takes the same rows of every rank's
        share, because the output layer gathers the shares.
        """
        shares = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        labels = labels.view(shares, -1)
        step = max(rows // shares, 1)
        losses = [
            tensor_parallel.checkpoint(self._chunk_loss, False, hidden, label.reshape(1, -1)).view(shares, -1)
            for hidden, label in zip(hidden_states.split(step), labels.split(step, dim=1), strict=True)
        ]
        return torch.cat(losses, dim=1).view(1, -1)

    def _chunk_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=weight)
        return self.compute_language_model_loss(labels, logits)


def chunk_loss(model: GPTModel) -> None:
    """Make ``model`` compute its loss in chunks wherever its logits would take over 1 GiB."""
    model.__class__ = ChunkedLossGPTModel
