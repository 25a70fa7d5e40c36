"""The keyword arguments of ``distca.CAD``, the object that a training script makes, and checks of these arguments.

A *server* is a process that computes core attention (attention without projections). Every rank is a server; the
argument ``servers`` adds processes without a model. The argument ``backward`` says where a server gets q, k and v for
backward. With "keep" the server keeps them from forward. With "resend" the ranks that sent them send them again.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_type_hints

import numpy as np
from megatron.core.transformer import TransformerConfig

from distca.cad_options import CadOptions
from distca.errors import SupportError
from megatron_patches.model.latent import is_latent
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.te.choice import Linears

Recompute = Literal["none", "all"]
How = Literal["keep", "resend"]
Level = Literal["auto", "attention", "time"]

_CHECKED_WHERE_CHOSEN = {"transport", "kernel"}
_WHOLE = {"tokens_per_rank", "servers", "ranks_per_node"}
_LEAST = {
    "tokens_per_rank": 1,
    "servers": 0,
    "ranks_per_node": 0,
    "tolerance": 0,
    "nvshmem_buffer_gb": 0,
    "server_gb_s": 0,
}
_MAY_DIFFER = {"kernel", "cost_table", "keep_outputs"}
"""Arguments that may differ between ranks."""


@dataclass(frozen=True, kw_only=True)
class CadArguments(CadOptions):
    """The keyword arguments of ``distca.CAD``: the fields of :class:`distca.cad_options.CadOptions`, and these fields.

    Attributes:
        tokens_per_rank: the most tokens of a micro-batch, divided by the number of data-parallel ranks. If the script
            gives documents their ranks, this is also the most tokens of a micro-batch on each rank.
        disaggregate: False is the baseline: every document stays whole on one rank, which computes its attention with
            the same kernels.
        deal: True lets a plan move documents to other micro-batches of the step, so that ranks exchange fewer rows. No
            document moves if the script gives documents their ranks, or if ``disaggregate`` is False.
        level: what a plan makes about equal on all servers: the seconds of "attention", or the "time" of attention and
            linear layers together. "time" needs ``disaggregate``, ``ping_pong`` (a micro-batch runs as two parts), and
            pipeline stages, ``servers`` or ``speeds``. "auto" is "time" on GPUs if these conditions hold, and the first
            server's cost table has times of linear layers. Different cost tables of servers then count like ``speeds``.
            In other runs, and with the transport "nvshmem", "auto" is "attention".
        recompute: with "none" backward recomputes modules that Megatron's configuration names, and what
            ``keep_outputs`` would keep. With "all" it recomputes layers except core attention; a GPTModel
            without ``disaggregate`` recomputes whole layers.
        keep_outputs: True keeps the outputs of norms and SwiGLU for backward, which takes more memory and less time. It
            needs recompute "none", and a configuration without recomputed modules and without FP8.
        offload: True keeps every layer's inputs, q, k, v and attention outputs in host memory until backward. It needs
            ``disaggregate``, recompute "all", backward "resend" or "auto", and neither stages nor ``servers``. A model
            with recurrent layers, ``hybrid_layer_pattern`` or ``attention_output_gate`` cannot have it.
        linears: whose linear layers a model gets: Megatron's own ("local"), Transformer Engine's ("te"), or Transformer
            Engine's if they work here ("auto"). Transformer Engine's need GPUs, bfloat16, and a model without experts
            or latent attention. FP8 needs "te" or "auto", and the configuration's ``fp8`` ("hybrid" or "e4m3") and
            ``fp8_recipe`` ("tensorwise", "delayed" or "blockwise"). The configuration's ``fp8_param`` (weights without
            a bfloat16 copy) needs the distributed optimizer.
        hybrid_layer_pattern: Megatron's ``hybrid_layer_pattern`` of a HybridModel; empty for a GPTModel.
        model_options: options of the model for which Megatron's configuration has no field.
    """

    tokens_per_rank: int
    disaggregate: bool = True
    deal: bool = True
    level: Level = "auto"
    recompute: Recompute = "none"
    keep_outputs: bool = False
    offload: bool = False
    linears: Linears = "auto"
    hybrid_layer_pattern: str = ""
    model_options: ModelOptions = MEGATRONS

    def check(self) -> None:
        """Raises SupportError for the first argument of a wrong type, with an unknown word or a number out of range."""
        for name, hint in get_type_hints(CadArguments).items():
            value, words = getattr(self, name), get_args(hint)
            if hint is bool and not isinstance(value, bool | np.bool_):
                raise SupportError(f"`{name}` is {value!r}; it can be True or False.")
            if isinstance(next(iter(words), None), str) and name not in _CHECKED_WHERE_CHOSEN and value not in words:
                raise SupportError(f"`{name}` is {value!r}; it can be {', '.join(words)}.")
        for name, least in _LEAST.items():
            number = getattr(self, name)
            kind, called = (Integral, "a whole number") if name in _WHOLE else (Real, "a number")
            if number is None and name == "tolerance":
                continue
            if not isinstance(number, kind) or isinstance(number, bool):
                raise SupportError(f"`{name}` is {number!r}; it must be {called}.")
            if not (math.isfinite(number) and float(number) >= least):
                raise SupportError(f"`{name}` is {number}; it must be at least {least}.")
        if not isinstance(self.cost_table, str | Path | None):
            raise SupportError(
                f"`cost_table` is {self.cost_table!r}; it must be the path of a file or folder, or None."
            )
        if not isinstance(self.speeds, tuple | list) or not all(isinstance(each, Real) for each in self.speeds):
            raise SupportError(f"`speeds` is {self.speeds!r}; it must be a tuple of numbers.")
        if not isinstance(self.hybrid_layer_pattern, str):
            raise SupportError(f"`hybrid_layer_pattern` is {self.hybrid_layer_pattern!r}; it must be a text.")
        if not isinstance(self.model_options, ModelOptions):
            raise SupportError(f"`model_options` is {self.model_options!r}; it must be a distca.ModelOptions.")

    def how(self, stages: int) -> How:
        """Returns ``backward``, with "auto" replaced by "keep" or "resend".

        Raises:
            SupportError: two arguments do not go together.
        """
        found: How = "resend" if stages > 1 or self.offload else "keep"
        if self.backward != "auto":
            found = self.backward
        check_level(self.level, self.disaggregate, stages, self.ping_pong, bool(self.servers or self.speeds))
        if self.speeds and not self.disaggregate:
            raise SupportError(
                "speeds are given, but disaggregate is False, so each rank computes its own attention: omit speeds."
            )
        if self.servers and not self.disaggregate:
            raise SupportError(
                f"servers is {self.servers}, but disaggregate is False, so each rank computes its own attention: set "
                "servers to 0."
            )
        if self.server_gb_s and not self.servers:
            raise SupportError(f"server_gb_s is {self.server_gb_s}, but servers is 0: leave server_gb_s out.")
        if self.offload:
            check_offload(self.disaggregate, self.recompute, found, stages)
        return found

    def own_layers(self, config: TransformerConfig) -> bool:
        """Whether DistCA's layers replace Megatron's TransformerLayer."""
        return (
            self.disaggregate
            or bool(self.hybrid_layer_pattern)
            or self.model_options.own_layers
            or bool(config.num_moe_experts)
            or is_latent(config)
        )

    def with_servers(self, numbers: Sequence[int], at_first: Sequence[int], homes: int, tp: int) -> CadArguments:
        """Returns the arguments as they hold for the servers without a model that are present now.

        Args:
            numbers: the numbers of the present servers.
            at_first: the numbers of the servers with which the run began.
            homes: the number of ranks with the model in a pool.
            tp: the number of tensor-parallel ranks.
        """
        # ``speeds`` begins with ``homes`` values for the ranks with the model. Then it has one value for every ``tp``
        # consecutive servers. Servers that were not there at first have speed 1. Example with ``tp`` 1: servers 0 and 1
        # began with speeds 0.5 and 2. If servers 1 and 2 are present now, their speeds are 2 and 1.
        speeds = tuple(self.speeds)
        if speeds:
            speed_of = dict(zip(at_first[::tp], speeds[homes:], strict=True))
            speeds = speeds[:homes] + tuple(speed_of.get(each, 1.0) for each in numbers[::tp])
        # `ranks_per_node` must divide the number of ranks and servers in a pool. If it no longer does, it becomes 0,
        # with which every machine is a node.
        nodes = self.ranks_per_node
        if nodes and (homes + len(numbers) // tp) % nodes:
            nodes = 0
        rate = self.server_gb_s if numbers else 0.0
        return replace(self, servers=len(numbers), speeds=speeds, ranks_per_node=nodes, server_gb_s=rate)

    @property
    def alike(self) -> dict[str, Any]:
        """The arguments, by name, that must be the same on all ranks."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _MAY_DIFFER}
        return found | {"model_options": repr(self.model_options)}


Keywords = ParamSpec("Keywords")
Made = TypeVar("Made")
Self = TypeVar("Self")


def with_keywords_of(
    made: Callable[Keywords, Made],
) -> Callable[
    [Callable[[Self, TransformerConfig, Made], None]], Callable[Concatenate[Self, TransformerConfig, Keywords], None]
]:
    """Decorates a constructor ``(self, config, arguments)``; ``made`` is the class of ``arguments``.

    The decorated constructor takes the fields of ``made`` as keywords instead, and raises TypeError for other keywords.
    """

    def decorate(
        constructor: Callable[[Self, TransformerConfig, Made], None],
    ) -> Callable[Concatenate[Self, TransformerConfig, Keywords], None]:
        theirs = inspect.signature(made).parameters
        known = list(theirs)

        @functools.wraps(constructor)
        def constructed(
            self: Self, config: TransformerConfig, *args: Keywords.args, **keywords: Keywords.kwargs
        ) -> None:
            for name in keywords.keys() - known:
                close = get_close_matches(name, known, n=1)
                hint = f"Did you mean {close[0]}?" if close else f"It has {', '.join(known)}."
                raise TypeError(f"{type(self).__name__} has no argument {name!r}. {hint}")
            constructor(self, config, made(*args, **keywords))

        own = inspect.signature(constructor)
        first = list(own.parameters.values())[:2]
        constructed.__signature__ = own.replace(parameters=[*first, *theirs.values()])  # type: ignore[attr-defined]
        return constructed

    return decorate


def check_offload(disaggregate: bool, recompute: str, backward: str, stages: int) -> None:
    """Raises SupportError if an argument has another value than ``offload`` needs.

    ``backward`` is "keep" or "resend": callers have replaced "auto".
    """
    found = {"disaggregate": disaggregate, "recompute": recompute, "backward": backward}
    needed = {"disaggregate": True, "recompute": "all", "backward": "resend"}
    for name, value in needed.items():
        if found[name] != value:
            raise SupportError(
                f"offload is True, but {name} is {found[name]!r}: set it to {value!r}, or offload to False."
            )
    if stages > 1:
        raise SupportError(
            f"offload is True, but there are {stages} pipeline stages, with which it is not supported: set offload to "
            "False, or do without stages."
        )


def check_keep_outputs(recompute: str, config: TransformerConfig) -> None:
    """Raises SupportError if an argument or a field has another value than ``keep_outputs`` needs."""
    found = {"recompute": (recompute, "none"), "recompute_granularity": (config.recompute_granularity, None)}
    found["fp8"] = config.fp8, None
    for name, (value, needed) in found.items():
        if value != needed:
            raise SupportError(
                f"keep_outputs is True, but {name} is {value!r}: set it to {needed!r}, or keep_outputs to False."
            )


def check_level(level: str, disaggregate: bool, stages: int, ping_pong: bool, unlike: bool = False) -> None:
    """Raises SupportError if ``level`` is "time", but no server is ever idle, or idle servers could not help.

    ``unlike`` says whether servers differ in speed, or some servers have no model.
    """
    if level != "time" or (disaggregate and (stages > 1 or unlike) and ping_pong):
        return
    why = "disaggregate is False" if not disaggregate else "ping_pong is False, so idle servers could not help others"
    if disaggregate and stages == 1 and not unlike:
        why = "there are no pipeline stages, servers or speeds, so no rank is ever idle"
    raise SupportError(f"level is 'time', but {why}: set level to 'auto'.")
