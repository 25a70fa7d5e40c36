"""Triton kernel of the gradients within chunks of the gated delta rule; one program computes a chunk and a head.

Formulas and arguments are explained in ``distca/recurrent/chunk_gradients.py``, which calls it. The kernel has no loop.
fla-core's kernel adds up products over blocks of columns in a loop, which Triton 3.4 to 3.7.0 compiles wrongly for
Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LEAST, _MOST = 16, 128
"""The smallest and the largest number of a head's columns. Triton's products need 16, and a program has room for 128.
Other heads are computed by torch."""


def serves(*columns: int) -> bool:
    """Whether the kernel can compute heads of these numbers of columns: powers of 2 from 16 to 128."""
    return all(_LEAST <= each <= _MOST and each & (each - 1) == 0 for each in columns)


def chunk_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    u: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    g: torch.Tensor,
    du: torch.Tensor,
    scale: float,
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dq, dk, dw and dg, in the shapes of q, k, k and g; dg is float32."""
    q, k, u, do, h, dh, g, du = (each.contiguous() for each in (q, k, u, do, h, dh, g, du))
    dq, dk, dw, dg = (torch.empty_like(each) for each in (q, k, k, g))
    heads, keys, values = q.shape[2], q.shape[3], u.shape[3]
    _chunk_gradients[(len(chunk_indices), heads)](
        *(q, k, u, do, h, dh, g, du, dq, dk, dw, dg, cu_seqlens, chunk_indices),
        *(scale, heads),
        K=keys,
        V=values,
        C=chunk_size,
        num_warps=8,
        num_stages=1,
    )
    return dq, dk, dw, dg


@triton.jit
def _chunk_gradients(  # type: ignore[no-untyped-def]
    q_of, k_of, u_of, do_of, h_of, dh_of, g_of, du_of, dq_of, dk_of, dw_of, dg_of, borders, chunks, scale, heads,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    piece, number = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    begin = tl.load(borders + piece) + number * C
    rows = tl.minimum(tl.load(borders + piece + 1) - begin, C)
    at = tl.arange(0, C)
    inside, place = at < rows, (begin + at) * heads + head
    of_keys = place[:, None] * K + tl.arange(0, K)[None, :]
    of_values = place[:, None] * V + tl.arange(0, V)[None, :]
    q = tl.load(q_of + of_keys, mask=inside[:, None], other=0.0)
    k = tl.load(k_of + of_keys, mask=inside[:, None], other=0.0)
    u = tl.load(u_of + of_values, mask=inside[:, None], other=0.0)
    do = tl.load(do_of + of_values, mask=inside[:, None], other=0.0)
    du = tl.load(du_of + of_values, mask=inside[:, None], other=0.0)
    g = tl.load(g_of + place, mask=inside, other=0.0)
    g_last = tl.load(g_of + (begin + rows - 1) * heads + head)
    of_state = ((chunk * heads + head) * K + tl.arange(0, K))[:, None] * V + tl.arange(0, V)[None, :]
    state, d_state = tl.load(h_of + of_state).to(q.dtype), tl.load(dh_of + of_state).to(q.dtype)

    seen = (at[:, None] >= at[None, :]) & inside[:, None] & inside[None, :]
    decay = tl.exp2(tl.where(seen, g[:, None] - g[None, :], 0.0))
    products = tl.dot(do, tl.trans(u), input_precision="ieee")
    products = tl.where(seen, scale * decay * products, 0.0).to(q.dtype)
    dq = (scale * tl.exp2(g))[:, None] * tl.dot(do, tl.trans(state), input_precision="ieee")
    dq += tl.dot(products, k, input_precision="ieee")
    dk_of_state = tl.where(inside, tl.exp2(g_last - g), 0.0)[:, None]
    dk_of_state *= tl.dot(u, tl.trans(d_state), input_precision="ieee")
    dk = dk_of_state + tl.dot(tl.trans(products), q, input_precision="ieee")
    dw = -tl.dot(du, tl.trans(state), input_precision="ieee")
    q, k = q.to(tl.float32), k.to(tl.float32)
    dg = tl.sum(dq * q, axis=1) - tl.sum(dk * k, axis=1)
    # The last row's g is the decay of the whole chunk, so it also gets the gradient from the state.
    of_chunk = tl.exp2(g_last) * tl.sum(state.to(tl.float32) * d_state.to(tl.float32)) + tl.sum(dk_of_state * k)
    dg += tl.where(at == rows - 1, of_chunk, 0.0)
    tl.store(dq_of + of_keys, dq.to(dq_of.dtype.element_ty), mask=inside[:, None])
    tl.store(dk_of + of_keys, dk.to(dk_of.dtype.element_ty), mask=inside[:, None])
    tl.store(dw_of + of_keys, dw.to(dw_of.dtype.element_ty), mask=inside[:, None])
    tl.store(dg_of + place, dg, mask=inside)
