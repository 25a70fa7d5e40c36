"""Notes the state of a model at the end of ``CAD.attach``, and refuses to run the model once the state has changed.

``CAD`` is the object that a training script makes. Its ``attach`` checks a model's configuration and modules, and
copies some settings. A later change could have no effect, or bring in an unsupported setting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from distca.runtime import AttentionPool

_MAY_CHANGE = {
    "gradient_accumulation_fusion",
    "deallocate_pipeline_outputs",
    "disable_parameter_transpose_cache",
    "fused_single_qkv_rope",
    "timers",
    "barrier_with_L1_time",
}
"""Fields of the configuration that may change: ``CAD`` sets them itself, or Megatron reads them anew in every step."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # attributes of a module
_NEVER_CALLED = ("", "self_attention", "self_attention.core_attention", "self_attention.conv1d", "mixer")
"""Modules of a disaggregated layer, by path, whose parts are called one by one. Their own ``forward`` never runs. "" is
the layer itself."""


@dataclasses.dataclass(frozen=True)
class Attached:
    """The state of a model at the end of :meth:`megatron_patches.api.CAD.attach`.

    Attributes:
        pool: the kernel and transport of the CAD that attached the model; every CAD has its own pool.
        fields: values of the model's configuration, by field.
        modules: all modules of the model, by name.
        disaggregated: whether other ranks compute parts of this rank's core attention.
    """

    pool: AttentionPool
    fields: dict[str, Any]
    modules: dict[str, torch.nn.Module]
    disaggregated: bool


def note_attached(model: GPTModel, pool: AttentionPool, disaggregated: bool) -> None:
    """Stores the state of a model in its attribute ``attached``, after all changes of ``CAD.attach``."""
    model.attached = Attached(pool, fields_of(model.config), dict(model.named_modules()), disaggregated)


def check_same_config(model: GPTModel, config: TransformerConfig) -> None:
    """Refuses a model whose configuration differs from the configuration of the CAD.

    Raises:
        SupportError: a field differs; the message names the first such field.
    """
    for name, ours, theirs in _differences(fields_of(config), fields_of(model.config)):
        raise SupportError(
            f"The model was built with {name} {theirs!r}, but the CAD with {ours!r}: give both the same "
            "TransformerConfig."
        )


def check_as_attached(model: Any, pool: AttentionPool) -> None:
    """Refuses a model that another CAD attached, or that has changed since it was attached.

    ``pool`` is the kernel and transport of the CAD that is going to run the model.

    Raises:
        SupportError: another CAD attached the model, the model has changed, or a hook would never run.
    """
    then: Attached = model.attached
    if then.pool is not pool:
        raise SupportError("The model was attached by another CAD: run it with the CAD that attached it.")
    for name, before, now in _differences(then.fields, fields_of(model.config)):
        raise SupportError(
            f"{name} of the model's configuration is {now!r}, but was {before!r} when CAD attached the model, and "
            f"parts of the model keep the earlier value: set {name} back, or set {name} before CAD is made, and build "
            "and attach the model anew."
        )
    modules = dict(model.named_modules())
    for name, module in then.modules.items():
        if modules.get(name) is not module:
            raise SupportError(
                f"{name} of the model was replaced or removed after CAD.attach: change the model before CAD.attach, "
                "which checks it."
            )
    if then.disaggregated:
        _check_hooks(model)


def _check_hooks(model: Any) -> None:
    for number, layer in enumerate(model.decoder.layers):
        for part, module in layer.named_modules():
            if part in _NEVER_CALLED and any(getattr(module, hooks) for hooks in _HOOKS):
                place = f"decoder.layers.{number}.{part}".removesuffix(".")
                raise SupportError(
                    f"{place} has a hook, which would never run: a disaggregated layer's parts are called one by "
                    "one. Put the hook on the layer's norms, linear_qkv, linear_proj or mlp."
                )


def fields_of(config: TransformerConfig) -> dict[str, Any]:
    """Returns the values of a configuration by field, without fields that may change and without most functions."""
    names = (field.name for field in dataclasses.fields(config) if field.name not in _MAY_CHANGE)
    values = {name: getattr(config, name) for name in names}
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name == "activation_func" or not name.endswith(("_func", "_method"))
    }


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in before | now:
        ours, theirs = before.get(name), now.get(name)
        if ours is not theirs and ours != theirs:
            yield name, ours, theirs
