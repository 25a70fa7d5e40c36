"""Full weights and gradients in tensor-parallel shares, by megatron's own layout of each parameter."""

from __future__ import annotations

import torch

from megatron_patches.te.fp8_weights import set_values


def share_of(name: str, full: torch.Tensor, shape: torch.Size, rank: int, gated: bool = True) -> torch.Tensor:
    """This tensor-parallel rank's share of a full parameter.

    Args:
        name: the parameter's name in a GPTModel.
        full: its value in a model without tensor parallelism.
        shape: its shape on this rank.
        rank: this tensor-parallel rank.
        gated: the MLPs have a gate.
    """
    if full.shape == shape:
        return full
    dim = next(d for d in range(full.dim()) if full.shape[d] != shape[d])
    if gated and name.endswith(("linear_fc1.weight", "linear_fc1.bias")):
        # Each rank's rows are its part of the gate, then its part of the up projection.
        gate, up = full.chunk(2, dim=0)
        rows = shape[0] // 2
        return torch.cat((gate[rank * rows : (rank + 1) * rows], up[rank * rows : (rank + 1) * rows]))
    return full.narrow(dim, rank * shape[dim], shape[dim])


def load_full_weights(model: torch.nn.Module, full: dict[str, torch.Tensor], rank: int, gated: bool = True) -> None:
    """Copy this rank's shares of full parameters into ``model``; ``gated``: its MLPs have a gate."""
    for name, parameter in model.named_parameters():
        set_values(parameter, share_of(name, full[name], parameter.shape, rank, gated))
