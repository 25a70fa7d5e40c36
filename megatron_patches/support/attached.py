"""Notes the state of a model at the end of ``CAD.attach``, and refuses to run the model once the state has changed.

``CAD`` is the object that a training script makes. ``CAD.attach`` checks a model and copies some of its settings. A
later change to the model might have no effect, or make the model unsupported.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from distca.runtime import AttentionPool
from megatron_patches.experts.layer import NanoBatchExperts
from megatron_patches.model.added_to_forward import added_to_forward

_MAY_CHANGE = {
    "gradient_accumulation_fusion",
    "deallocate_pipeline_outputs",
    "disable_parameter_transpose_cache",
    "fused_single_qkv_rope",
    "timers",
    "barrier_with_L1_time",
}
"""Fields of the configuration that may change: ``CAD`` sets them itself, or Megatron reads them in every step."""
_EXPERTS, _LINEAR = "mlp.experts", ("linear_fc1", "linear_fc2")
"""The path of a layer's experts in the layer, and the names of the experts' linear layers.

Experts usually run as grouped products, without the ``forward`` of these linear layers. After a hook is put on one of
these linear layers, their ``forward`` runs. So such a hook is not refused."""


@dataclasses.dataclass(frozen=True)
class Attached:
    """The state of a model at the end of :meth:`megatron_patches.api.CAD.attach`.

    Attributes:
        pool: the attention kernel and transport of the CAD that attached the model. No two CADs share a pool.
        fields: values of the model's configuration, by field.
        modules: for each module inside the model: name, parent module, the module itself, and its class.
        uncalled: the paths, inside a layer, of modules whose ``forward`` never runs; from :func:`never_called`.
    """

    pool: AttentionPool
    fields: dict[str, Any]
    modules: list[tuple[str, torch.nn.Module, torch.nn.Module, type]]
    uncalled: tuple[str, ...]


def never_called(disaggregate: bool, *, hybrid: bool, own_layers: bool) -> tuple[str, ...]:
    """Returns the paths, inside a layer, of modules whose ``forward`` never runs; "" is the layer itself.

    Args:
        disaggregate: whether other ranks may compute core attention.
        hybrid: whether the model is a HybridModel.
        own_layers: whether this project's layers replace Megatron's.
    """
    if disaggregate or hybrid:
        paths = ("", "self_attention", "self_attention.conv1d", "mixer", "mixer.act")
        return (*paths, "self_attention.core_attention") if disaggregate else paths
    return ("self_attention",) if own_layers else ()


def note_attached(model: GPTModel, pool: AttentionPool, uncalled: tuple[str, ...]) -> None:
    """Stores the state of a model in ``model.attached``. ``CAD.attach`` calls this function after all its changes.

    ``uncalled`` is from :func:`never_called`.
    """
    named = dict(model.named_modules())
    modules = [(name, named[name.rpartition(".")[0]], module, type(module)) for name, module in named.items() if name]
    model.attached = Attached(pool, fields_of(model.config), modules, uncalled)


def check_same_config(model: GPTModel, config: TransformerConfig) -> None:
    """Checks that a model was built with the same configuration as the CAD.

    Raises:
        SupportError: a field differs; the message names the first such field.
    """
    for name, ours, theirs in _differences(fields_of(config), fields_of(model.config)):
        raise SupportError(
            f"The model was built with {name} {theirs!r}, but the CAD with {ours!r}: give both the same "
            "TransformerConfig."
        )


def check_as_attached(model: Any, pool: AttentionPool) -> None:
    """Checks that the CAD with ``pool`` attached the model, and that nothing of :class:`Attached` has changed since.

    Raises:
        SupportError: another CAD attached the model; a field or module has changed; or a hook or a changed ``forward``
            in a layer would never run.
    """
    then: Attached = model.attached
    if then.pool is not pool:
        raise SupportError("The model was attached by another CAD: run it with the CAD that attached it.")
    for name, before, now in _differences(then.fields, fields_of(model.config)):
        raise SupportError(
            f"{name} of the model's configuration is {now!r}, but was {before!r} when CAD attached the model, and "
            f"parts of the model have copied this value: set {name} back, or set {name} before CAD is made, and build "
            "and attach the model anew."
        )
    for name, holder, module, kind in then.modules:
        if holder._modules.get(name.rpartition(".")[2]) is not module or type(module) is not kind:
            raise SupportError(
                f"{name} of the model was replaced, removed or given another class after CAD.attach: change the model "
                "before CAD.attach, which checks it."
            )
    _check_hooks(then)


def _check_hooks(then: Attached) -> None:
    for name, _, module, _ in then.modules:
        added = added_to_forward(module)
        if added and _never_runs(module, _path_in_layer(name), then.uncalled):
            raise SupportError(
                f"{name} has {added}, which would never run: the layer's parts are called one by one. Leave it out, or "
                "put it on the layer's norms, router, linear_qkv, linear_proj or mlp without experts."
            )


def _never_runs(module: torch.nn.Module, path: str | None, uncalled: tuple[str, ...]) -> bool:
    if path is None:
        return False
    of_experts = path == _EXPERTS or (path.startswith(f"{_EXPERTS}.") and not path.endswith(_LINEAR))
    return path in uncalled or of_experts or ("" in uncalled and isinstance(module, NanoBatchExperts))


def _path_in_layer(name: str) -> str | None:
    layer = re.fullmatch(r"decoder\.layers\.\d+\.?(.*)", name)
    return None if layer is None else layer[1]


def fields_of(config: TransformerConfig) -> dict[str, Any]:
    """Returns the values of a configuration by field, without fields that may change.

    The result has ``activation_func``, but no other field for a function. Some of those are set after ``CAD.attach``,
    for example ``no_sync_func`` in every step."""
    values = {name: getattr(config, name) for name in _names(type(config))}  # type: ignore[arg-type]  # a class is hashable
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name == "activation_func"
        or not (name.endswith(("_func", "init_method")) and (value is None or callable(value)))
    }


@cache
def _names(kind: type[TransformerConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in _MAY_CHANGE]


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in before | now:
        ours, theirs = before.get(name), now.get(name)
        if ours is not theirs and ours != theirs:
            yield name, ours, theirs
