"""The arguments that a user gives :class:`megatron_patches.api.CAD` beside Megatron's configuration."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_type_hints

from megatron.core.transformer import TransformerConfig

from distca.cad_options import CadOptions
from distca.errors import SupportError
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.te.choice import Linears

Recompute = Literal["none", "all"]
How = Literal["keep", "resend"]

_CHECKED_WHERE_CHOSEN = {"transport", "kernel"}
_WHOLE = {"tokens_per_rank", "servers"}
_LEAST = {"tokens_per_rank": 1, "servers": 0, "tolerance": 0, "nvshmem_buffer_gb": 0, "server_gb_s": 0}
_MAY_DIFFER = {
    "transport",
    "kernel",
    "cost_table",
    "nvshmem_buffer_gb",
    "recompute",
    "keep_outputs",
    "offload",
    "linears",
}
"""Arguments that may differ between ranks, or that are compared elsewhere."""


@dataclass(frozen=True, kw_only=True)
class CadArguments(CadOptions):
    """The keyword arguments of ``distca.CAD``: those of :class:`distca.cad_options.CadOptions`, and these.

    Attributes:
        tokens_per_rank: most tokens of a micro-batch, over the data-parallel ranks of a stage; with homes, of each.
        disaggregate: False computes every document's attention at home, on whole documents, with the same kernels and
            Megatron's own layers and schedules: the baseline.
        recompute: with "none", backward recomputes what the configuration says, which may be
            ``recompute_modules=["mlp"]``. With "all", it recomputes everything but core attention; where attention is
            at home, it recomputes every layer as a whole, as Megatron's full recomputation does.
        keep_outputs: whether the outputs of norms and SwiGLU are kept for backward, not computed again. This takes more
            memory and less time. It needs recompute "none", and no recomputed modules.
        offload: whether the inputs that backward needs of every layer wait in host memory. It needs recompute "all",
            resend, which "auto" then takes, and no pipeline stages.
        linears: "local" takes Megatron's own linear layers, "te" Transformer Engine's, on GPUs and in bfloat16, and
            "auto" Transformer Engine's where they can be used. Only these can compute in FP8, by the configuration's
            ``fp8`` ("hybrid" or "e4m3") and ``fp8_recipe`` ("tensorwise", which scales by the current tensor, "delayed"
            or "blockwise"). With its ``fp8_param`` weights are FP8 numbers alone, and
            :meth:`megatron_patches.api.CAD.data_parallel` needs the distributed optimizer.
        hybrid_layer_pattern: the pattern with which a HybridModel is built; empty for a GPTModel.
        model_options: options that Megatron's configuration has no field for. The defaults are a model that is all in
            the configuration.
    """

    tokens_per_rank: int
    disaggregate: bool = True
    recompute: Recompute = "none"
    keep_outputs: bool = False
    offload: bool = False
    linears: Linears = "auto"
    hybrid_layer_pattern: str = ""
    model_options: ModelOptions = MEGATRONS

    def check(self) -> None:
        """Refuses unknown values and numbers out of range; transport and kernel are checked where they are chosen.

        Raises:
            SupportError: a value is refused; it names the first.
        """
        for name, hint in get_type_hints(CadArguments).items():
            value, served = getattr(self, name), get_args(hint)
            if isinstance(next(iter(served), None), str) and name not in _CHECKED_WHERE_CHOSEN and value not in served:
                raise SupportError(f"`{name}` is {value!r}; it can be {', '.join(served)}.")
        for name, least in _LEAST.items():
            number = getattr(self, name)
            kind, called = (Integral, "a whole number") if name in _WHOLE else (Real, "a number")
            if number is None and name == "tolerance":
                continue
            if not isinstance(number, kind) or isinstance(number, bool):
                raise SupportError(f"`{name}` is {number!r}; it must be {called}.")
            if not (math.isfinite(number) and float(number) >= least):
                raise SupportError(f"`{name}` is {number}; it must be at least {least}.")

    def how(self, stages: int) -> How:
        """Returns the way in which backward gets its rows with these arguments.

        Raises:
            SupportError: ``level`` or ``offload`` is not served with the other arguments.
        """
        found: How = "resend" if stages > 1 or self.offload else "keep"
        if self.backward != "auto":
            found = self.backward
        check_level(self.level, self.disaggregate, stages, self.ping_pong, bool(self.servers or self.speeds))
        if self.speeds and not self.disaggregate:
            raise SupportError(
                "speeds are given, but disaggregate is False, so each home computes what it has: leave it out."
            )
        if self.servers and not self.disaggregate:
            raise SupportError(
                f"servers is {self.servers}, but disaggregate is False, and attention stays at home: set servers to 0."
            )
        if self.server_gb_s and not self.servers:
            raise SupportError(f"server_gb_s is {self.server_gb_s}, but servers is 0: leave server_gb_s out.")
        if self.offload:
            check_offload(self.disaggregate, self.recompute, found, stages)
        return found

    @property
    def alike(self) -> dict[str, Any]:
        """The arguments, by name, that must be the same on all ranks."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _MAY_DIFFER}
        return found | {"model_options": repr(self.model_options), "speeds": repr(self.speeds)}


Keywords = ParamSpec("Keywords")
Made = TypeVar("Made")
Self = TypeVar("Self")


def with_keywords_of(
    made: Callable[Keywords, Made],
) -> Callable[
    [Callable[[Self, TransformerConfig, Made], None]], Callable[Concatenate[Self, TransformerConfig, Keywords], None]
]:
    """Decorates a constructor that takes a configuration and an object that ``made`` makes.

    The decorated one takes the configuration and the keywords of ``made``, and makes the object itself."""

    def decorate(
        constructor: Callable[[Self, TransformerConfig, Made], None],
    ) -> Callable[Concatenate[Self, TransformerConfig, Keywords], None]:
        @functools.wraps(constructor)
        def constructed(
            self: Self, config: TransformerConfig, *args: Keywords.args, **keywords: Keywords.kwargs
        ) -> None:
            constructor(self, config, made(*args, **keywords))

        own = inspect.signature(constructor)
        first = list(own.parameters.values())[:2]
        theirs = inspect.signature(made).parameters.values()
        constructed.__signature__ = own.replace(parameters=[*first, *theirs])  # type: ignore[attr-defined]
        return constructed

    return decorate


def check_offload(disaggregate: bool, recompute: str, backward: str, stages: int) -> None:
    """Refuses ``offload`` where home ranks keep no rows of their own for backward.

    Args:
        disaggregate, recompute, backward: as in :class:`megatron_patches.api.CAD`.
        stages: number of pipeline stages.

    Raises:
        SupportError: one of the arguments does not go with ``offload``.
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
            f"offload is True, but there are {stages} pipeline stages, with which it is not served: set offload to "
            "False, or do without stages."
        )


def check_keep_outputs(recompute: str, config: TransformerConfig) -> None:
    """Refuses ``keep_outputs`` where outputs are computed again anyway, or kept as FP8 copies.

    Args:
        recompute: as in :class:`megatron_patches.api.CAD`.
        config: the model's configuration.

    Raises:
        SupportError: an argument or a field does not go with ``keep_outputs``.
    """
    found = {"recompute": (recompute, "none"), "recompute_granularity": (config.recompute_granularity, None)}
    found["fp8"] = config.fp8, None
    for name, (value, needed) in found.items():
        if value != needed:
            raise SupportError(
                f"keep_outputs is True, but {name} is {value!r}: set it to {needed!r}, or keep_outputs to False."
            )


def check_level(level: str, disaggregate: bool, stages: int, ping_pong: bool, unlike: bool = False) -> None:
    """Refuses to level time where no server is ever idle, or where an idle one could only wait.

    Args:
        level, disaggregate, ping_pong: as in :class:`megatron_patches.api.CAD`.
        stages: number of pipeline stages.
        unlike: whether servers differ in their speed, or in having a model.

    Raises:
        SupportError: ``level`` is "time" there.
    """
    if level != "time" or (disaggregate and (stages > 1 or unlike) and ping_pong):
        return
    why = "disaggregate is False" if not disaggregate else "ping_pong is False, so idle stages could only wait"
    if disaggregate and stages == 1 and not unlike:
        why = "there are no pipeline stages, and only stages are ever idle"
    raise SupportError(f"level is 'time', but {why}: set level to 'auto'.")
