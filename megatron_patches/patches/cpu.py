"""Replaces torch functions, so that Megatron-Core, which asks for CUDA in many places, runs on CPUs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch

_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros")
"""Functions of torch that Megatron-Core calls to make tensors on CUDA devices."""

_replaced = False


def use_cpu() -> None:
    """Makes Megatron-Core run on CPUs in this process from now on."""
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
        # Torch would store each seed and its call stack until a device is initialised, which never happens here.
        absent.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()  # type: ignore[attr-defined]
        module.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)  # type: ignore[attr-defined]
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # Here CUDA's random state is the CPU's. Each weight that is drawn changes it, of which Megatron would warn.
    logging.getLogger(megatron_random.__name__).addFilter(lambda record: "RNG state" not in record.getMessage())
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    torch.Tensor.type = _names_types_of_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    # At the first ``with torch.device(...)`` torch stores the list of functions to which such a context gives a device.
    # The list must have torch's own functions, so a context is used here, before some of them are replaced. Otherwise
    # contexts would have no effect, and models that transformers loads would have rotary frequencies without values.
    with torch.device("cpu"):
        torch.empty(0)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # If Megatron was imported before ``before_import.py`` replaced torch.compile, this turns compiling off.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.disable = True


class HostStream(torch.cpu.Stream):
    """Takes the place of CUDA's streams and events. CPU calls return when their work is done, so waits do nothing."""

    def record_event(self) -> HostStream:  # type: ignore[override]
        return self

    def synchronize(self) -> None: ...


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``function``: a CUDA device, as ``device`` or as second argument, becomes the CPU."""

    @wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = torch.device("cpu")
        if len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return function(*args, **kwargs)

    return on_cpu


def _names_types_of_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Tensor.type`` to return names such as torch.cuda.FloatTensor, which Megatron expects."""

    @wraps(function)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return type_


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")
