"""Reads and sets a weight's optimizer state in float32, from torch's Adam or Transformer Engine's.

The state is the float32 weight and Adam's two moments. With torch's Adam, Megatron's optimizer holds the float32
weight, and Adam holds float32 moments. Transformer Engine's Adam may hold both in fewer bytes. Its moments may be
scaled numbers of a smaller type. Of a float32 weight it may hold only the lower 16 bits, as the bfloat16 weight of the
model has the upper ones.

Checkpoints hold float32 (``checkpoint/optimizer_state.py``). So a run can go on with another Adam than it began with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_WHOLE = "master_param"
"""The name under which Transformer Engine's Adam holds the float32 weight or its lower 16 bits; torch's has no such
name."""


def inner_adams(optimizer: Any) -> Iterator[Any]:
    """Yields the Adam optimizers inside Megatron's optimizer, which may chain several.

    They are Transformer Engine's or Apex's where one is installed, else torch's.
    """
    if hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from inner_adams(part)
    else:
        yield optimizer.optimizer


def set_step(adam: Any, step: int) -> None:
    """Sets the number of steps done, by which Adam corrects the bias of its moments.

    torch's Adam holds a float32 scalar for each weight, on the weight's device. Others hold an integer for each
    parameter group.
    """
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        for weight, state in adam.state.items():
            state["step"] = torch.tensor(float(step), device=weight.device)
    else:
        for group in adam.param_groups:
            group["step"] = step


def get_states(adam: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the weight, by the name "param", and its moments, by Adam's names, all in float32.

    A tensor that Adam holds in float32 is returned itself, without a copy.

    Args:
        adam: the optimizer.
        weight: one of its parameters.
    """
    states = {"param": weight.detach()}
    for name, held in adam.state[weight].items():
        if name == _WHOLE and held.dtype == torch.int16:  # the lower 16 bits
            states["param"] = join(weight, held)
        elif name != "step":
            values = adam.get_unscaled_state(weight, name) if _scales(adam) else held
            states["param" if name == _WHOLE else name] = values.detach()
    return states


def set_state(adam: Any, weight: torch.Tensor, name: str, values: torch.Tensor) -> None:
    """Sets one tensor that :func:`get_states` returns; a set float32 weight also sets the bfloat16 weight.

    Args:
        adam: the optimizer, which has a state for the weight already.
        weight: one of its parameters.
        name: "param" or a moment's name.
        values: float32, on the weight's device.
    """
    state = adam.state[weight]
    held = state.get(_WHOLE if name == "param" else name)
    with torch.no_grad():
        if held is None:
            weight.copy_(values)
        elif held.dtype == torch.int16:
            top, rest = split(values)
            weight.copy_(top)
            held.copy_(rest)
        elif _scales(adam):
            adam.set_scaled_state(weight, _WHOLE if name == "param" else name, values.float())
            if name == "param":
                weight.copy_(values)
        else:
            held.copy_(values)


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits float32 numbers into bfloat16 numbers, rounded half up, and int16 remainders, as Transformer Engine does.

    The remainder is the lower 16 bits as a signed number. It is negative if the bfloat16 number was rounded up. For
    example, the bits 0x3F80_8001 become 0x3F81 and the remainder 0x8001, which is -0x7FFF.
    """
    bits = values.float().contiguous().view(torch.int32)
    rest = bits.bitwise_and(0xFFFF).to(torch.int32)
    rest = torch.where(rest >= 0x8000, rest - 0x10000, rest).to(torch.int16)
    top = (bits >> 16) + (rest < 0)
    return (top << 16).view(torch.float32).bfloat16(), rest


def join(top: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Returns the float32 numbers that :func:`split` split into ``top`` and ``rest``."""
    upper = top.detach().contiguous().view(torch.int16).to(torch.int32) - (rest < 0).to(torch.int32)
    return ((upper << 16) | (rest.to(torch.int32) & 0xFFFF)).view(torch.float32)


def _scales(adam: Any) -> bool:
    """Whether this Adam may hold its state as scaled numbers; only Transformer Engine's has the method."""
    return hasattr(adam, "get_unscaled_state")
