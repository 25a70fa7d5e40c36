"""The state that Adam holds of a weight, read and set in float32, whatever Adam holds it in. So a checkpoint goes on
with any Adam.

torch's holds float32 moments, and megatron the float32 weight. Transformer Engine's may hold both in fewer bytes:
scaled moments, and of the float32 weight only the 16 bits that the bfloat16 one lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_WHOLE = "master_param"
"""The name of the float32 weight in Transformer Engine's Adam, where it holds that."""


def inner_adams(optimizer: Any) -> Iterator[Any]:
    """Yields the Adam optimizers inside megatron's: torch's, or those of Apex or Transformer Engine where installed."""
    if hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from inner_adams(part)
    else:
        yield optimizer.optimizer


def set_step(adam: Any, step: int) -> None:
    """Sets the number of steps done, by which Adam corrects its moments.

    torch's keeps one for every weight, as a float32 scalar where the weight is; others keep one for every group.
    """
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        for weight, state in adam.state.items():
            state["step"] = torch.tensor(float(step), device=weight.device)
    else:
        for group in adam.param_groups:
            group["step"] = step


def get_states(adam: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight, by the name "param", and its moments, in float32. One that Adam holds in float32 is Adam's tensor.

    Args:
        adam: the optimizer.
        weight: one of its parameters.
    """
    states = {"param": weight.detach()}
    for name, held in adam.state[weight].items():
        if name == _WHOLE and held.dtype == torch.int16:
            states["param"] = join(weight, held)
        elif name != "step":
            values = adam.get_unscaled_state(weight, name) if _scales(adam) else held
            states["param" if name == _WHOLE else name] = values.detach()
    return states


def set_state(adam: Any, weight: torch.Tensor, name: str, values: torch.Tensor) -> None:
    """Set what :func:`get_states` gives by that name.

    Args:
        adam: the optimizer; its state of the weight is there.
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
    """Splits float32 numbers into bfloat16 numbers, rounded half up, and int16 remainders, their lower 16 bits.

    A negative remainder tells that the number was rounded up."""
    bits = values.float().contiguous().view(torch.int32)
    rest = bits.bitwise_and(0xFFFF).to(torch.int32)
    rest = torch.where(rest >= 0x8000, rest - 0x10000, rest).to(torch.int16)
    top = (bits >> 16) + (rest < 0)
    return (top << 16).view(torch.float32).bfloat16(), rest


def join(top: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Joins the results of :func:`split` to float32 numbers."""
    upper = top.detach().contiguous().view(torch.int16).to(torch.int32) - (rest < 0).to(torch.int32)
    return ((upper << 16) | (rest.to(torch.int32) & 0xFFFF)).view(torch.float32)


def _scales(adam: Any) -> bool:
    """Whether this Adam holds scaled numbers of fewer bytes, as Transformer Engine's may."""
    return hasattr(adam, "get_unscaled_state")
