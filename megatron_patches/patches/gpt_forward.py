"""Defines the forward that ``distca.CAD.attach`` gives to a model, and functions that change logits and embeddings.

The new forward takes a micro-batch object (``steps/batch_context.py``) in place of the attention mask. It can return
the sum of losses or the labels' log-probabilities. For these it computes logits of some rows at a time, to save memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from typing import Any, Literal

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel

from distca.errors import SupportError
from distca.ops.logits import AS_THEY_ARE, LogitTransform
from distca.ops.output_loss import VocabularyShards, log_probabilities, output_loss
from megatron_patches.experts.balance import ExpertLoad, MicroBatchBalance
from megatron_patches.steps.batch_context import DisaggregatedMicroBatch, PackedMicroBatch

_IGNORED = ("inference_context", "inference_params", "packed_seq_params", "extra_block_kwargs", "padding_mask")
"""Arguments of Megatron's forward that layers of this project do not read."""


class PatchedForward(LanguageModule):
    """The class with the new forward. :func:`patch_forward` makes it a base class of a built model's class.

    Attributes:
        vocabulary: number of token ids, if the output layer has rows of padding; else None.
        takes: the class that ``attention_mask`` of :meth:`forward` must have.
        expert_load: counts of the rows that experts got, for the log.
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
        """Runs the model.

        Args:
            input_ids: [1, rows] token ids.
            position_ids: [1, rows] position of each row in its document, for RoPE.
            attention_mask: the attribute ``attention`` of a batch that the model's ``distca.CAD`` planned.
            summed_loss: whether to return the sum of losses; needs ``labels`` and ``loss_mask``, by name.
            log_probabilities: whether to return log-probabilities; needs ``labels``, by name.
            args, kwargs: other arguments of Megatron's forward, such as ``labels``.

        Returns:
            With ``summed_loss`` a scalar: the sum of the tokens' losses, each times its ``loss_mask``. With
            ``log_probabilities`` [1, rows] logarithms of the labels' probabilities. Otherwise Megatron's result, for
            example [1, rows] losses with labels. All pipeline stages but the last return hidden states.

        Raises:
            SupportError: torch.autocast is on; an argument is missing, has the wrong class or not as many rows as the
                batch, or would be ignored; ``summed_loss`` is set, and ``loss_mask`` requires a gradient; both
                ``summed_loss`` and ``log_probabilities`` are set; or one of them is set for a model whose output layer
                or loss the user changed.
        """
        if position_ids is None:
            raise SupportError("The model was called without position_ids; pass the batch's positions.")
        check_no_autocast(position_ids.device)  # later pipeline stages may have no input_ids
        if not isinstance(attention_mask, self.takes):
            raise SupportError(
                f"The model was called with a {type(attention_mask).__name__} as attention_mask; pass the `attention` "
                "of a batch that the model's own CAD planned."
            )
        given = self._checked(args, kwargs)
        _check_rows(attention_mask, input_ids, position_ids, given)
        if summed_loss and (kwargs.get("labels") is None or kwargs.get("loss_mask") is None):
            raise SupportError("summed_loss needs labels and loss_mask; pass both by name, or leave summed_loss out.")
        if summed_loss and torch.is_grad_enabled() and kwargs["loss_mask"].requires_grad:
            raise SupportError(
                "loss_mask requires a gradient, which summed_loss would not compute: pass loss_mask.detach(), or leave "
                "summed_loss out and sum the tokens' losses under loss_mask."
            )
        if log_probabilities and (summed_loss or kwargs.get("labels") is None):
            raise SupportError("log_probabilities needs labels and no summed_loss; pass the batch's labels by name.")
        if (summed_loss or log_probabilities) and (own := _own_output(self)):
            raise SupportError(
                f"The model has {own}, which summed_loss and log_probabilities would ignore: leave both arguments out; "
                "with labels, the model then returns each token's loss."
            )
        if (summed_loss or log_probabilities) and given.get("output_processor") is not None:
            raise SupportError(
                "The model was called with output_processor, which summed_loss and log_probabilities would ignore: "
                "leave output_processor out, or both summed_loss and log_probabilities."
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

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Refuses arguments of Megatron's forward that would be ignored; returns all arguments by name."""
        given = dict(zip(_further_arguments(megatrons_class(self)), args, strict=False)) | kwargs  # type: ignore[arg-type]
        for name in _IGNORED:
            if given.get(name) is not None:
                raise SupportError(
                    f"The model was called with {name}, which would be ignored, as a step runs whole documents: leave "
                    "it out."
                )
        return given

    def _with_balance(self, micro_batch: Any) -> Any:
        layers = self.expert_load.layers
        if not layers:
            return micro_batch
        rows = micro_batch.documents, micro_batch.nano_rows, micro_batch.document_count
        return replace(micro_batch, balance=MicroBatchBalance.of(self.config, layers, *rows))

    def _megatrons(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs Megatron's forward. If ``_returns`` is set, :meth:`_output` replaces its output layer and loss."""
        raise NotImplementedError

    def _output(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        layer = self.output_layer
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else layer.weight
        shards = VocabularyShards(layer.tp_group, layer.sequence_parallel, self.vocabulary)
        hidden, labels = hidden_states.squeeze(1), kwargs["labels"].flatten()
        transform = self.logit_transform
        if getattr(self.config, "use_mup", False):
            transform = replace(transform, multiplier=transform.multiplier * self.config.mup_output_mult)
        if self._returns == "log_probabilities":
            return log_probabilities(hidden, weight, labels, shards, transform=transform)[None]
        return output_loss(hidden, weight, labels, kwargs["loss_mask"].flatten(), shards, transform=transform)


class PatchedGPT(PatchedForward, GPTModel):
    def _megatrons(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Calls the forward of the built model's class, which comes after PatchedForward in Python's MRO.
        output: torch.Tensor = super(PatchedForward, self).forward(*args, **kwargs)
        return output

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._preprocess(*args, **kwargs)
        if not self.config.multi_latent_attention:
            return made
        # For multi-latent attention Megatron's second item is None, but this project's layers need RoPE's angles there.
        return made[0], self.rotary_pos_emb(), *made[2:]

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._returns or not self.post_process:
            return super()._postprocess(hidden_states, *args, **kwargs)
        return self._output(hidden_states, **kwargs)


class PatchedHybrid(PatchedForward):
    post_process: bool

    def _megatrons(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        ours = bool(self._returns) and self.post_process
        if not ours:
            return self._forward(*args, **kwargs)
        self.post_process = False  # Megatron's forward then returns hidden states
        try:
            hidden_states = self._forward(*args, **kwargs)
        finally:
            self.post_process = True
        return self._output(hidden_states, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = super(PatchedForward, self).forward(*args, **kwargs)
        return output


def patch_forward(model: LanguageModule, takes: type[DisaggregatedMicroBatch] | type[PackedMicroBatch]) -> None:
    """Gives a built model the new forward: its class becomes a subclass with the same name."""
    own = type(model)
    patched = PatchedGPT if isinstance(model, GPTModel) else PatchedHybrid
    model.__class__ = type(own.__name__, (patched, own), {"__module__": own.__module__})
    model.takes = takes


@cache
def _further_arguments(kind: type[LanguageModule]) -> list[str]:
    """Returns the names of the arguments of Megatron's forward behind the attention mask."""
    names = list(signature(kind.forward).parameters)
    return names[names.index("attention_mask") + 1 :]


def _check_rows(
    micro_batch: DisaggregatedMicroBatch | PackedMicroBatch,
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor,
    others: Mapping[str, Any],
) -> None:
    """Refuses tensors with more or fewer rows than the micro-batch has, if its ``nano_rows`` are known."""
    if not micro_batch.nano_rows:
        return
    rows = sum(micro_batch.nano_rows)
    given = {"input_ids": input_ids, "position_ids": position_ids}
    given |= {name: others.get(name) for name in ("labels", "loss_mask")}
    for name, each in given.items():
        if each is not None and (each.numel() != rows or (name == "input_ids" and each.ndim != 2)):
            raise SupportError(
                f"The model was called with {name} of shape {list(each.shape)}, and the batch of its `attention` has "
                f"[1, {rows}]: pass the tensors of one batch as they are."
            )


def _own_output(model: PatchedForward) -> str:
    """Returns the words for a user's change of the output layer or loss; "" without a change."""
    classes = type(model).__mro__
    base, own = megatrons_class(model), classes[classes.index(PatchedForward) + 1]
    for name in ("_postprocess", "compute_language_model_loss"):
        if getattr(own, name, None) is not getattr(base, name, None):
            return f"a {name} of its own"
    return _added_to_output(model.output_layer) if model.post_process else ""


def _added_to_output(layer: Any) -> str:
    """Returns the words for what a user added to the output layer; "" without such a change."""
    tables = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    hooks = [hook for table in tables for hook in table.values()]
    if any(getattr(hook, "func", None) not in (_mask_padding, _transform_logits) for hook in hooks):
        return "hooks on its output layer"
    if layer._compiled_call_impl is not None:
        return "a compiled output layer"
    return "a forward of its own in its output layer" if "forward" in vars(layer) else ""


def megatrons_class(model: Any) -> type[LanguageModule]:
    """Returns GPTModel or HybridModel, from which the model's class derives."""
    names = ("GPTModel", "HybridModel")
    # The MRO is searched from its end, because patch_forward's class may have a Megatron class's name and module.
    classes = reversed(type(model).__mro__)
    return next(each for each in classes if each.__name__ in names and each.__module__.startswith("megatron.core"))


def check_no_autocast(device: torch.device) -> None:
    """Raises SupportError if torch.autocast would change the types of a model's activations."""
    if torch.is_autocast_enabled(device.type):
        raise SupportError(
            "The model was called inside of torch.autocast, but activations have the type of the weights: leave "
            "autocast out; for bfloat16 set bf16=True and params_dtype=torch.bfloat16 in the TransformerConfig."
        )


def check_attached(model: Any) -> None:
    """Raises SupportError for a model without the new forward."""
    if not isinstance(model, PatchedForward):
        raise SupportError(
            f"The model is a {type(model).__module__}.{type(model).__name__} that was not attached: take the model "
            "that CAD.attach returned."
        )


def check_unwrapped(model: PatchedForward) -> None:
    """Raises SupportError for a model that was wrapped in Megatron's DistributedDataParallel before."""
    if any(hasattr(parameter, "main_grad") for parameter in model.parameters()):
        raise SupportError(
            "The model is in a DistributedDataParallel already, and a second one would hook its weights too: call "
            "CAD.data_parallel once."
        )


def leave_out_padding(model: LanguageModule, vocabulary: int) -> None:
    """Makes the softmax leave out the output layer's padding: its rows from row ``vocabulary`` on."""
    model.vocabulary = vocabulary
    if model.post_process:
        model.output_layer.register_forward_hook(partial(_mask_padding, vocabulary))


def _mask_padding(vocabulary: int, layer: Any, _: Any, output: tuple[torch.Tensor, Any]) -> None:
    logits = output[0]
    VocabularyShards(layer.tp_group, layer.sequence_parallel, vocabulary).mask_padding_(logits)


def transform_logits(model: LanguageModule, transform: LogitTransform) -> None:
    """Makes the model apply ``transform`` to its logits, before padding is masked."""
    model.logit_transform = transform
    if model.post_process and transform != AS_THEY_ARE:
        model.output_layer.register_forward_hook(partial(_transform_logits, transform), prepend=True)


def _transform_logits(
    transform: LogitTransform, _: Any, __: Any, output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    return transform(output[0]), output[1]


def scale_embeddings(model: LanguageModule, scale: float) -> None:
    """Makes the model multiply its embeddings by ``scale``, which is first rounded to the embeddings' dtype."""
    if model.pre_process and scale != 1.0:
        model.embedding.register_forward_hook(partial(_scaled, scale))


def _scaled(scale: float, _: Any, __: Any, embeddings: torch.Tensor) -> torch.Tensor:
    return embeddings * torch.tensor(scale, dtype=embeddings.dtype)
