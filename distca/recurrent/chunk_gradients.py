"""One step of the gated delta rule's backward: the gradients of q, k and decays within chunks of rows.

fla-core computes recurrent layers in *chunks* of 64 rows. It has a kernel for this step, but refuses to run it on
Hopper with Triton 3.4 to 3.7.0. These compile it wrongly for some head sizes (fla-org/flash-linear-attention issue
640). There :func:`chunk_gradients` replaces it, with our Triton kernel (ops/triton/chunk_gradients.py) or products of
torch.

S is the state before a chunk, and dS the gradient of the state behind it. G_i is the sum of g from the chunk's first
row to row i. Row i adds k_i u_iᵀ to the state:

    P = scale · tril(e^{G_i−G_j} do_i·u_j);   dq = scale · e^G do Sᵀ + P k;   dk = e^{G_C−G} u dSᵀ + Pᵀ q;   dw = −du Sᵀ

w are intermediate rows of fla-core. All terms of dq_i grow with e^{G_i}, and all of dk_j with e^{−G_j}. So the gradient
of G_i is dq_i·q_i − dk_i·k_i, with a further term in the chunk's last row, for the decay of the state.

Shape suffixes: N rows, H heads, K elements of a head of k, V of one of v; T chunks, C rows of a chunk, M = T·H.
"""

from __future__ import annotations

import torch

from distca.ops.triton import has_kernels

_CHUNKS_AT_ONCE = 128
"""Chunks that torch computes at a time; with 32 heads of 128 they take 2 GiB of intermediate tensors."""


def chunk_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor,
    chunk_size: int,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dq, dk and dw in the shape of q, and dg in float32.

    It replaces a function of fla-core, so the names of arguments are fla-core's.

    Args:
        q, k: [1, N, H, K].
        v: [1, N, H, V] u, the rows that are added to the state.
        do: [1, N, H, V] gradients of the outputs.
        h: [1, T, H, K, V] states before chunks.
        dh: [1, T, H, K, V] gradients of the states behind chunks.
        w: [1, N, H, K], of which only the shape is read.
        g: [1, N, H] G over log 2, so that e^G is 2 to the power of this.
        dv: [1, N, H, V] gradients of u.
        scale: factor on the outputs.
        cu_seqlens: first rows of the sequences (here pieces of documents), and the end of the last one.
        chunk_indices: [T, 2] each chunk's sequence, and its number there.
        chunk_size: C.
        state_v_first: the order of the dimensions of ``h``; must be False.
    """
    assert not state_v_first and q.shape == k.shape == w.shape
    if has_kernels(q, "gradients within chunks") and q.dtype != torch.float32:
        from distca.ops.triton import chunk_gradients as kernels

        if kernels.serves(q.shape[3], v.shape[3]):
            return kernels.chunk_gradients(q, k, v, do, h, dh, g, dv, scale, cu_seqlens, chunk_indices, chunk_size)
    rows = q.shape[1]
    places_TC = _places(cu_seqlens, chunk_indices, chunk_size, rows)
    # Chunks at the end of a sequence may have fewer rows. Their other places write to one row behind all rows.
    dq, dk, dw = (each.new_empty(rows + 1, *each.shape[2:]) for each in (q, k, w))
    dg = g.new_empty(rows + 1, g.shape[2])
    for first in range(0, len(places_TC), _CHUNKS_AT_ONCE):
        chunks = slice(first, first + _CHUNKS_AT_ONCE)
        places = places_TC[chunks]
        found = _of_chunks(
            [each[0] for each in (q, k, v, do, dv)], g[0], h[0, chunks], dh[0, chunks], places, places < rows, scale
        )
        for whole, part in zip((dq, dk, dw, dg), found, strict=True):
            whole[places.flatten()] = part.to(whole.dtype)
    return dq[None, :rows], dk[None, :rows], dw[None, :rows], dg[None, :rows]


def _places(cu_seqlens: torch.Tensor, chunk_indices: torch.Tensor, chunk_size: int, rows: int) -> torch.Tensor:
    """[T, C] numbers of each chunk's rows; ``rows`` for places of a chunk without a row."""
    piece, number = chunk_indices.unbind(1)
    within = torch.arange(chunk_size, device=piece.device)
    places_TC = cu_seqlens[piece][:, None] + chunk_size * number[:, None] + within
    return torch.where(places_TC < cu_seqlens[piece + 1][:, None], places_TC, rows)


def _of_chunks(
    heads: list[torch.Tensor],
    g_NH: torch.Tensor,
    h_THKV: torch.Tensor,
    dh_THKV: torch.Tensor,
    places_TC: torch.Tensor,
    is_row_TC: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk and dw as [T·C, H, K] and dg as [T·C, H], for some chunks.

    Args:
        heads: q, k, u, do and du of all rows.
        g_NH: G of all rows.
        h_THKV: states before these chunks.
        dh_THKV: gradients of the states behind these chunks.
        places_TC: the chunks' rows.
        is_row_TC: whether a place of a chunk has a row.
        scale: factor on the outputs.
    """
    # The rows of each chunk and head become one matrix of a batch of M. Variables have the names of the formulas above;
    # "products" is P, and "seen" says which rows j of a chunk are not behind row i.
    places = places_TC.clamp(max=len(g_NH) - 1)
    q, k, u, do, du = ((each[places] * is_row_TC[..., None, None]).transpose(1, 2).flatten(0, 1) for each in heads)
    g_MC = torch.where(is_row_TC[..., None], g_NH[places], 0.0).transpose(1, 2).flatten(0, 1)
    is_row_MC = is_row_TC.repeat_interleave(g_NH.shape[1], dim=0)
    state, dstate = h_THKV.flatten(0, 1).to(q.dtype), dh_THKV.flatten(0, 1).to(q.dtype)
    last = is_row_MC.sum(1, keepdim=True) - 1
    g_last = g_MC.gather(1, last)
    seen = (is_row_MC[:, :, None] & is_row_MC[:, None]).tril()
    decay = torch.where(seen, g_MC[:, :, None] - g_MC[:, None], -torch.inf).exp2()
    products = (scale * decay * _product(do, u.mT)).to(q.dtype)
    dq = scale * g_MC.exp2()[..., None] * _product(do, state.mT) + _product(products, k)
    dk_of_state = torch.where(is_row_MC, (g_last - g_MC).exp2(), 0.0)[..., None] * _product(u, dstate.mT)
    dk = dk_of_state + _product(products.mT, q)
    dg = (dq * q).sum(2) - (dk * k).sum(2)
    of_state = (state.float() * dstate.float()).sum((1, 2))[:, None]
    dg = dg.scatter_add(1, last, g_last.exp2() * of_state + (dk_of_state * k).sum((1, 2))[:, None])
    dw = -_product(du, state.mT)
    return tuple(each.unflatten(0, (len(places), -1)).transpose(1, 2).flatten(0, 1) for each in (dq, dk, dw, dg))


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The batched matrix product, in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
