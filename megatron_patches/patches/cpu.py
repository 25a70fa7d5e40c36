"""Replacements of torch functions that let megatron-core run on CPUs, where there is no GPU.

megatron-core names CUDA in about fifteen places: devices of small tensors, random states, type names. A dense GPT does
not need it. Here such calls get the CPU instead.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch

_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros")

_replaced = False


def use_cpu() -> None:
    """Makes megatron-core run on CPUs in this process from now on; it may be called again."""
    global _replaced
    if _replaced:
        return
    _replaced = True
    from megatron.core.tensor_parallel import random as megatron_random

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_stream = HostStream  # type: ignore[assignment]
    torch.cuda.Stream, torch.cuda.stream = HostStream, nullcontext  # type: ignore[assignment,misc]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    for absent in (torch.cuda, torch.xpu, torch.mtia):
        # torch keeps seeds for devices that are not there until they start, each with the whole stack as text.
        absent.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()  # type: ignore[attr-defined]
        module.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)  # type: ignore[attr-defined]
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # On CPUs Megatron's two random states are one, and it would log that for every weight that it draws.
    logging.getLogger(megatron_random.__name__).addFilter(lambda record: "RNG state" not in record.getMessage())
    # A mode of torch functions could do all of this in one place, but takes a fifth of the time of a small model's
    # step.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    torch.Tensor.type = _names_types_of_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    if "torch._dynamo" in sys.modules:  # megatron was imported before our before_import.py, and compiles its fusions
        torch._dynamo.config.disable = True


class HostStream(torch.cpu.Stream):
    """Stands in for a stream and for its events: on a CPU work has one order, and there is nothing to wait for."""

    def record_event(self) -> HostStream:  # type: ignore[override]
        return self

    def synchronize(self) -> None:
        pass


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` with "cuda" replaced by the CPU in its arguments and its ``device``."""

    @wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = torch.device("cpu")
        if len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return function(*args, **kwargs)

    return on_cpu


def _names_types_of_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``Tensor.type`` with names of CUDA's tensors, which Megatron compares with."""

    @wraps(function)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return type_


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")
