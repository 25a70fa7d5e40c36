"""GPTModel with the output layer and its loss in one operation."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from distca.ops.output_loss import VocabularyShards, output_loss


class FusedLossGPTModel(GPTModel):
    """GPTModel that, called with ``labels`` and ``loss_mask``, returns the sum of the losses; :func:`fuse_loss` turns a
    model into one. Without ``loss_mask`` it returns what GPTModel does."""

    gradients_in_backward = False

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        labels, loss_mask = kwargs.get("labels"), kwargs.get("loss_mask")
        if not self.post_process or labels is None or loss_mask is None:
            return super()._postprocess(hidden_states, *args, **kwargs)
        layer = self.output_layer
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else layer.weight
        shards = VocabularyShards(layer.tp_group, layer.sequence_parallel)
        rows = (hidden_states.squeeze(1), weight, labels.flatten(), loss_mask.flatten())
        return output_loss(*rows, shards, gradients_in_backward=self.gradients_in_backward)


def fuse_loss(model: GPTModel, gradients_in_backward: bool = False) -> None:
    """Make ``model`` compute its loss without ever holding all logits, and its gradients in forward or in backward."""
    model.__class__ = FusedLossGPTModel
    model.gradients_in_backward = gradients_in_backward
