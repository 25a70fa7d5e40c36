"""Run megatron-core on CPUs over gloo.

megatron-core asks for CUDA by name in about fifteen places (devices of small tensors, random states, type names),
although nothing in a dense GPT needs it. Here those questions get CPU answers. Only used where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode

_entered: list[TorchFunctionMode] = []


class _CudaMeansCpu(TorchFunctionMode):
    """Answers "cuda" in calls of torch functions with the CPU."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.to and any(_names_cuda(argument) for argument in args[1:]):
            args = (args[0], *(torch.device("cpu") if _names_cuda(argument) else argument for argument in args[1:]))
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def use_cpu() -> None:
    """Make megatron-core run on CPUs in this process, from now on; harmless to call again."""
    if _entered:
        return
    from megatron.core.tensor_parallel import random as megatron_random

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()  # type: ignore[attr-defined]
        module.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)  # type: ignore[attr-defined]
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # megatron compiles small fusions with torch.compile, which on CPUs needs a C++ compiler at run time.
    torch._dynamo.config.disable = True
    mode = _CudaMeansCpu()
    mode.__enter__()
    _entered.append(mode)
