"""Gradients within chunks of the gated delta rule, by one kernel, or as batched products.

fla has a kernel for them. It refuses to run on Hopper with Triton 3.4 to 3.7.0, which compile it wrongly for some sizes
of heads (fla-org/flash-linear-attention issue 640). This takes its place there. G are the sums of decays in a chunk, S
is the state before it, and dS the gradient of the state behind it. The rows add u to the state:

    P = scale · tril(e^{G_i−G_j} do_i·u_j);   dq = scale · e^G do Sᵀ + P k;   dk = e^{G_C−G} u dSᵀ + Pᵀ q;   dw = −du Sᵀ

G_i scales all of dq_i·q_i, and 1/G_j all of dk_j·k_j, which gives the gradient of G.

Shape suffixes: N rows, H heads, K elements of a head of k, V of one of v; T chunks, C rows of a chunk, M = T·H.
"""

from __future__ import annotations

import torch

from distca.ops.triton import has_kernels

_CHUNKS_AT_ONCE = 128  # 2 GiB of intermediate tensors for 32 heads of 128


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
    """Return dq, dk and dw in the shape of q, and dg in float32. Names of arguments are fla's.

    Args:
        q, k: [1, N, H, K].
        v: [1, N, H, V], the rows' additions.
        do, dv: [1, N, H, V].
        h: [1, T, H, K, V], states before chunks.
        dh: [1, T, H, K, V], gradients of states behind them.
        w: [1, N, H, K], of which only the shape is read.
        g: [1, N, H], sums of decays in their chunk as powers of 2.
        scale: of the outputs.
        cu_seqlens: first rows of the pieces, and their end.
        chunk_indices: [T, 2], each chunk's piece and its number there.
        chunk_size: C.
        state_v_first: False, the order of ``h``'s dimensions.
    """
    assert not state_v_first and q.shape == k.shape == w.shape
    if has_kernels(q, "gradients within chunks") and q.dtype != torch.float32:
        from distca.ops.triton import chunk_gradients as kernels

        if kernels.serves(q.shape[3], v.shape[3]):
            return kernels.chunk_gradients(q, k, v, do, h, dh, g, dv, scale, cu_seqlens, chunk_indices, chunk_size)
    rows = q.shape[1]
    places_TC = _places(cu_seqlens, chunk_indices, chunk_size, rows)
    # One row more, for what is computed where a chunk has no row.
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
    """[T, C] rows of each chunk; ``rows`` where it has none."""
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
    """dq, dk and dw as [T·C, H, K] and dg as [T·C, H] of some chunks; ``heads`` are q, k, u, do and du of all rows."""
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
    """Batched product, in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
