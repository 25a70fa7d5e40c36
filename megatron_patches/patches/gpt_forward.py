"""GPTModel's forward with positions from the caller, and by name the loss summed with the output layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from distca.errors import SupportError
from distca.ops.output_loss import VocabularyShards, output_loss


class PatchedForward(GPTModel):
    """Mixed into a built model's own class by :func:`patch_forward`, so that a subclass of GPTModel stays what it is.

    Called as GPTModel is, ``position_ids`` are the rows' positions in their documents, and rotary angles follow them.
    With labels it returns Megatron's loss of every token, [1, rows]. ``summed_loss=True`` returns their sum over
    ``loss_mask`` as one scalar instead, computed together with the output layer without ever holding all logits.
    """

    _sums_loss = False
    vocabulary: int | None = None

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        summed_loss: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See the class.

        Raises:
            SupportError: without positions, or a summed loss without labels or mask.
        """
        if position_ids is None:
            raise SupportError("The model was called without position_ids; pass the batch's positions.")
        if summed_loss and (kwargs.get("labels") is None or kwargs.get("loss_mask") is None):
            raise SupportError("summed_loss needs labels and loss_mask; pass both, or leave summed_loss out.")
        lengths = getattr(attention_mask, "document_lengths", None)
        self.rotary_pos_emb.set_positions(position_ids.flatten(), lengths)
        self._sums_loss = summed_loss
        try:
            return super().forward(input_ids, position_ids, attention_mask, *args, **kwargs)
        finally:
            self._sums_loss = False

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._sums_loss or not self.post_process:
            return super()._postprocess(hidden_states, *args, **kwargs)
        layer = self.output_layer
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else layer.weight
        shards = VocabularyShards(layer.tp_group, layer.sequence_parallel, self.vocabulary)
        labels, loss_mask = kwargs["labels"].flatten(), kwargs["loss_mask"].flatten()
        return output_loss(hidden_states.squeeze(1), weight, labels, loss_mask, shards)


def patch_forward(model: GPTModel) -> None:
    """Give ``model`` this forward, keeping its class's name and everything else of it."""
    own = type(model)
    model.__class__ = type(own.__name__, (PatchedForward, own), {"__module__": own.__module__})


def leave_out_padding(model: GPTModel, vocabulary: int) -> None:
    """Keep rows of the output layer from ever being predicted.

    Args:
        model: as built, with more rows than token ids.
        vocabulary: token ids; the rows from there on are padding.
    """
    model.vocabulary = vocabulary
    if model.post_process:
        model.output_layer.register_forward_hook(partial(_mask_padding, vocabulary))


def _mask_padding(vocabulary: int, layer: Any, _: Any, output: tuple[torch.Tensor, Any]) -> None:
    logits = output[0]
    VocabularyShards(layer.tp_group, layer.sequence_parallel, vocabulary).mask_padding_(logits)
