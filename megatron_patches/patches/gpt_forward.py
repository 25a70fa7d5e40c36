"""The forward of GPTModel and HybridModel with positions from the caller.

On request it returns the summed loss, computed together with the output layer, or the labels' log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel

from distca.errors import SupportError
from distca.ops.logits import AS_THEY_ARE, LogitTransform
from distca.ops.output_loss import VocabularyShards, log_probabilities, output_loss
from megatron_patches.experts.balance import ExpertLoad, MicroBatchBalance
from megatron_patches.steps.batch_context import DisaggregatedMicroBatch, PackedMicroBatch


class PatchedForward(LanguageModule):
    """A class that :func:`patch_forward` mixes into a built model's own class, so that a subclass of GPTModel or
    HybridModel stays one.

    It is called as these are; ``position_ids`` are the rows' positions in their documents, which set the rotary angles.

    - With labels it returns Megatron's loss of every token, [1, rows].
    - With ``summed_loss=True`` it returns the sum of these over ``loss_mask``, one scalar, computed together with the
      output layer, without all logits in memory at once.
    - With ``log_probabilities=True`` it returns the logarithm of every label's probability, [1, rows], in the same way.
      Its backward computes the output layer again.
    """

    _returns: Literal["", "summed_loss", "log_probabilities"] = ""
    vocabulary: int | None = None
    logit_transform = AS_THEY_ARE
    takes: type[DisaggregatedMicroBatch] | type[PackedMicroBatch]
    expert_load = ExpertLoad((), 1)

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        summed_loss: bool = False,
        log_probabilities: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See the class.

        Raises:
            SupportError: positions or a batch's attention are missing; a summed loss or log-probabilities are wanted
                without labels or mask; or they are wanted of a model that computes losses in its own way.
        """
        if position_ids is None:
            raise SupportError("The model was called without position_ids; pass the batch's positions.")
        if not isinstance(attention_mask, self.takes):
            raise SupportError(
                f"The model was called with a {type(attention_mask).__name__} as attention_mask; pass the `attention` "
                "of a batch that its own CAD planned."
            )
        if summed_loss and (kwargs.get("labels") is None or kwargs.get("loss_mask") is None):
            raise SupportError("summed_loss needs labels and loss_mask; pass both, or leave summed_loss out.")
        if log_probabilities and (summed_loss or kwargs.get("labels") is None):
            raise SupportError("log_probabilities needs labels, and no summed_loss beside it; pass the batch's labels.")
        if (summed_loss or log_probabilities) and (own := _own_output(self)):
            raise SupportError(
                f"The model has {own}, which summed_loss and log_probabilities would pass over, as they compute the "
                "output layer by themselves: leave them out, and sum the losses of tokens that the model returns."
            )
        lengths = getattr(attention_mask, "document_lengths", None)
        self.rotary_pos_emb.set_positions(position_ids.flatten(), lengths)
        attention_mask = self._with_balance(attention_mask)
        self._returns = "summed_loss" if summed_loss else "log_probabilities" if log_probabilities else ""
        try:
            output = self._megatrons(input_ids, position_ids, attention_mask, *args, **kwargs)
        finally:
            self._returns = ""
        if attention_mask.balance is not None and attention_mask.balance.training:
            self.expert_load.add(attention_mask.balance)
        return output

    def _with_balance(self, micro_batch: Any) -> Any:
        """Returns the micro-batch with counters for the routers of this stage's layers with experts."""
        layers = self.expert_load.layers
        if not layers:
            return micro_batch
        rows = micro_batch.documents, micro_batch.nano_rows, micro_batch.document_count
        return replace(micro_batch, balance=MicroBatchBalance.of(self.config, layers, *rows))

    def _megatrons(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs Megatron's forward, which returns the requested result in place of its losses."""
        raise NotImplementedError

    def _output(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Returns the requested result: the summed loss or log-probabilities."""
        layer = self.output_layer
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else layer.weight
        shards = VocabularyShards(layer.tp_group, layer.sequence_parallel, self.vocabulary)
        hidden, labels = hidden_states.squeeze(1), kwargs["labels"].flatten()
        transform = self.logit_transform
        if getattr(self.config, "use_mup", False):  # then Megatron's forward multiplies logits by this factor
            transform = replace(transform, multiplier=transform.multiplier * self.config.mup_output_mult)
        if self._returns == "log_probabilities":
            return log_probabilities(hidden, weight, labels, shards, transform=transform)[None]
        return output_loss(hidden, weight, labels, kwargs["loss_mask"].flatten(), shards, transform=transform)


class PatchedGPT(PatchedForward, GPTModel):
    """:class:`PatchedForward` of a GPTModel."""

    def _megatrons(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = super(PatchedForward, self).forward(*args, **kwargs)
        return output

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._preprocess(*args, **kwargs)
        if not self.config.multi_latent_attention:
            return made
        # With latent attention Megatron computes rotations in its layers; here the model passes them on.
        return made[0], self.rotary_pos_emb(), *made[2:]

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._returns or not self.post_process:
            return super()._postprocess(hidden_states, *args, **kwargs)
        return self._output(hidden_states, **kwargs)


class PatchedHybrid(PatchedForward):
    """:class:`PatchedForward` of a HybridModel."""

    post_process: bool

    def _megatrons(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        ours = bool(self._returns) and self.post_process
        if not ours:
            return self._forward(*args, **kwargs)
        self.post_process = False  # then Megatron returns what comes before the output layer
        try:
            hidden_states = self._forward(*args, **kwargs)
        finally:
            self.post_process = True
        return self._output(hidden_states, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = super(PatchedForward, self).forward(*args, **kwargs)
        return output


def patch_forward(model: LanguageModule, takes: type[DisaggregatedMicroBatch] | type[PackedMicroBatch]) -> None:
    """Gives ``model`` this forward; its class keeps its name and everything else.

    Args:
        model: a built model.
        takes: the class that its layers read in place of the attention mask.
    """
    own = type(model)
    patched = PatchedGPT if isinstance(model, GPTModel) else PatchedHybrid
    model.__class__ = type(own.__name__, (patched, own), {"__module__": own.__module__})
    model.takes = takes


def _own_output(model: PatchedForward) -> str:
    """Returns, in words, the step that a user's model adds to GPTModel between hidden states and losses; empty if it
    adds none."""
    classes = type(model).__mro__
    base, own = megatrons_class(model), classes[classes.index(PatchedForward) + 1]  # own is the user's class
    for name in ("_postprocess", "compute_language_model_loss"):
        if getattr(own, name, None) is not getattr(base, name, None):
            return f"a {name} of its own"
    layer = model.output_layer if model.post_process else None
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()] if layer is not None else []
    foreign = [hook for hook in hooks if getattr(hook, "func", None) not in (_mask_padding, _transform_logits)]
    return "hooks on its output layer" if foreign else ""


def megatrons_class(model: Any) -> type[LanguageModule]:
    """Returns GPTModel or HybridModel, whichever the model's class derives from."""
    names = ("GPTModel", "HybridModel")
    classes = reversed(type(model).__mro__)  # Megatron's first: the patched class has the same name
    return next(each for each in classes if each.__name__ in names and each.__module__.startswith("megatron.core"))


def check_attached(model: Any) -> None:
    """Refuses a model without this forward.

    Raises:
        SupportError: the model was not attached; it names its class.
    """
    if not isinstance(model, PatchedForward):
        raise SupportError(
            f"The model is a {type(model).__module__}.{type(model).__name__} that was not attached: take what "
            "CAD.attach returned."
        )


def check_unwrapped(model: PatchedForward) -> None:
    """Refuses a model whose gradients are reduced already.

    Raises:
        SupportError: the model is in a DistributedDataParallel.
    """
    if any(hasattr(parameter, "main_grad") for parameter in model.parameters()):
        raise SupportError(
            "The model is in a DistributedDataParallel already, whose hooks would stay: call CAD.data_parallel once."
        )


def leave_out_padding(model: LanguageModule, vocabulary: int) -> None:
    """Makes the output layer never predict its padding rows.

    Args:
        model: a built model with more rows than token ids.
        vocabulary: number of token ids; further rows are padding.
    """
    model.vocabulary = vocabulary
    if model.post_process:
        model.output_layer.register_forward_hook(partial(_mask_padding, vocabulary))


def _mask_padding(vocabulary: int, layer: Any, _: Any, output: tuple[torch.Tensor, Any]) -> None:
    logits = output[0]
    VocabularyShards(layer.tp_group, layer.sequence_parallel, vocabulary).mask_padding_(logits)


def transform_logits(model: LanguageModule, transform: LogitTransform) -> None:
    """Makes the model transform its logits before the softmax; padding rows are left out after that.

    Args:
        model: a model with this forward.
        transform: the transformation.
    """
    model.logit_transform = transform
    if model.post_process and transform != AS_THEY_ARE:
        model.output_layer.register_forward_hook(partial(_transform_logits, transform), prepend=True)


def _transform_logits(
    transform: LogitTransform, _: Any, __: Any, output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    return transform(output[0]), output[1]


def scale_embeddings(model: LanguageModule, scale: float) -> None:
    """Makes the model multiply its embeddings by ``scale``, rounded to their type."""
    if model.pre_process and scale != 1.0:
        model.embedding.register_forward_hook(partial(_scaled, scale))


def _scaled(scale: float, _: Any, __: Any, embeddings: torch.Tensor) -> torch.Tensor:
    return embeddings * torch.tensor(scale, dtype=embeddings.dtype)
