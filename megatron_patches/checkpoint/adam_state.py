"""Reads and sets a weight's optimizer state in float32, with torch's Adam or Transformer Engine's.

The state is the float32 weight and Adam's two moments. Transformer Engine's Adam may store moments as scaled numbers of
a smaller type. Of a float32 weight it may store only the lower 16 bits, beside the bfloat16 weight (:func:`split`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_MASTER = "master_param"
"""Transformer Engine's Adam has the float32 weight, or its lower 16 bits, under this key."""


def inner_adams(optimizer: Any) -> Iterator[Any]:
    """Yields the Adams inside Megatron's optimizer, which may be a chain of optimizers."""
    if hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from inner_adams(part)
    else:
        yield optimizer.optimizer


def set_step(adam: Any, step: int) -> None:
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        for weight, state in adam.state.items():
            state["step"] = torch.tensor(float(step), device=weight.device)
    else:
        for group in adam.param_groups:
            group["step"] = step


def get_states(adam: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the weight as "param" and its moments by Adam's names, in float32.

    Some of these tensors are not copies, but the tensors that Adam holds.
    """
    states = {"param": weight.detach()}
    for name, held in adam.state[weight].items():
        if name == _MASTER and held.dtype == torch.int16:
            states["param"] = join(weight, held)
        elif name != "step":
            values = adam.get_unscaled_state(weight, name) if _scales(adam) else held
            states["param" if name == _MASTER else name] = values.detach()
    return states


def set_state(adam: Any, weight: torch.Tensor, name: str, values: torch.Tensor) -> None:
    """Sets one moment, or the weight in both places: ``weight`` itself, and Adam's float32 copy, if there is one.

    Args:
        adam: the optimizer, which must have a state for the weight.
        name: the name of a moment, or "param" for the weight.
        values: float32, on the weight's device.
    """
    state = adam.state[weight]
    held = state.get(_MASTER if name == "param" else name)
    with torch.no_grad():
        if held is None:
            weight.copy_(values)
        elif held.dtype == torch.int16:
            top, rest = split(values)
            weight.copy_(top)
            held.copy_(rest)
        elif _scales(adam):
            adam.set_scaled_state(weight, _MASTER if name == "param" else name, values.float())
            if name == "param":
                weight.copy_(values)
        else:
            held.copy_(values)


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits float32 numbers into bfloat16 numbers and int16 remainders, as Transformer Engine does.

    A remainder is the lower 16 bits as a signed number. If it is negative, the upper 16 bits are increased by 1. For
    example, the bits 0x3F80_8001 become 0x3F81 and the remainder 0x8001, which is -0x7FFF.
    """
    bits = values.float().contiguous().view(torch.int32)
    rest = bits.bitwise_and(0xFFFF).to(torch.int32)
    rest = torch.where(rest >= 0x8000, rest - 0x10000, rest).to(torch.int16)
    top = (bits >> 16) + (rest < 0)
    return (top << 16).view(torch.float32).bfloat16(), rest


def join(top: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Undoes :func:`split`: returns float32 numbers from their bfloat16 numbers and remainders."""
    upper = top.detach().contiguous().view(torch.int16).to(torch.int32) - (rest < 0).to(torch.int32)
    return ((upper << 16) | (rest.to(torch.int32) & 0xFFFF)).view(torch.float32)


def _scales(adam: Any) -> bool:
    return hasattr(adam, "get_unscaled_state")
