"""The formula of recurrent cores, one row after the other on whole documents."""

from __future__ import annotations

import torch

from distca.recurrent import CoreParameters, Recurrence


def recurrent_core(
    mixed_NC: torch.Tensor,
    g: torch.Tensor,
    beta_NH: torch.Tensor,
    parameters: CoreParameters,
    lengths: list[int],
    what: Recurrence,
) -> torch.Tensor:
    """o_NHV of packed documents, in the dtype of their rows; differentiable in all tensors.

    Args:
        mixed_NC: rows before the convolution.
        g: g_NH or g_NHK.
        beta_NH: factors of the additions.
        parameters: of the core.
        lengths: of the documents.
        what: the recurrence.
    """
    outputs, begin = [], 0
    for length in lengths:
        rows = slice(begin, begin + length)
        outputs.append(_document(mixed_NC[rows], g[rows], beta_NH[rows], parameters, what))
        begin += length
    return torch.cat([*outputs, mixed_NC.new_zeros(0, what.heads, what.value_dim)])


def _document(
    mixed_NC: torch.Tensor, g: torch.Tensor, beta_NH: torch.Tensor, parameters: CoreParameters, what: Recurrence
) -> torch.Tensor:
    state = mixed_NC.new_zeros(what.state_shape)
    skip = mixed_NC.new_zeros(what.heads) if parameters.skip is None else parameters.skip
    repeats = what.heads // what.key_heads
    outputs = []
    for row in range(len(mixed_NC)):
        seen = [mixed_NC[row - back] * parameters.kernel[:, -1 - back] for back in range(min(row + 1, what.kernel))]
        mixed = torch.stack(seen).sum(0)
        if parameters.bias is not None:
            mixed = mixed + parameters.bias
        parts = dict(zip(what.columns, (mixed * torch.sigmoid(mixed)).split(what.widths), strict=True))
        q, k = (parts[name].view(what.key_heads, what.key_dim) for name in ("q", "k"))
        if what.normalise:
            q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (torch.stack([x[head // repeats] for head in range(what.heads)]) for x in (q, k))
        v = parts["v"].view(what.heads, what.value_dim)
        kept = g[row].exp()
        state = (kept[:, :, None] if what.decay_by_channel else kept[:, None, None]) * state
        held = torch.einsum("hkv,hk->hv", state, k) if what.delta else 0.0
        state = state + torch.einsum("hk,hv->hkv", k, beta_NH[row][:, None] * (v - held))
        outputs.append(what.scale * torch.einsum("hkv,hk->hv", state, q) + skip[:, None] * v)
    return torch.stack(outputs)
