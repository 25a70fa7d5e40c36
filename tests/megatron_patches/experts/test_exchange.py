"""Rows that travel to the ranks of their experts and back, held against all experts on one rank."""

from itertools import accumulate, product

import torch
import torch.distributed as dist

from distca.testing.ranks import run_ranks

EXPERTS, HIDDEN = 8, 6
CASES = list(product(((1, 33), (0, 4), (4, 0), (0, 0)), (1, 2, 4), (False, True)))
"""Each rank's rows; the experts of a row, where with four all rows go to both ranks; whether a rank's last expert comes
first."""


def _off(rows_of, topk, last_first):
    """The largest error of outputs and gradients on this rank, in float64; and whether all rows go to all ranks."""
    from megatron_patches.experts.dispatch import Dispatch
    from megatron_patches.experts.exchange import Exchange

    rank, here = dist.get_rank(), EXPERTS // dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    given = torch.rand(3, rows_of[rank], EXPERTS, generator=generator, dtype=torch.float64)
    hidden, probs, upstream = given[0, :, :HIDDEN], given[1], given[2, :, :HIDDEN]
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(1, probs.topk(topk).indices, True)
    weights = torch.rand(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    leaves = [each.clone().requires_grad_() for each in (hidden, probs)]
    exchange = Exchange(Dispatch.of(chosen, topk, dist.group.WORLD, rows_of))
    rows, factors = exchange.join_rows(exchange.launch_rows(*leaves), last_first)
    groups, own = exchange.dispatch.groups, weights[rank * here : (rank + 1) * here]
    assert groups.ends_E.dtype == torch.int32 and groups.ends_E.tolist() == list(accumulate(groups.rows))
    parts = zip(rows.split(groups.rows), own.flip(0) if last_first else own, strict=True)
    outputs = torch.cat([part @ weight for part, weight in parts])
    found = exchange.join_outputs(exchange.launch_outputs(outputs * factors[:, None]))
    alone = [each.clone().requires_grad_() for each in (hidden, probs)]
    expected = torch.einsum("nh,ehk,ne->nk", alone[0], weights, alone[1] * chosen)
    pairs = zip(
        (found, *torch.autograd.grad(found, leaves, upstream)),
        (expected, *torch.autograd.grad(expected, alone, upstream)),
        strict=True,
    )
    return max(float((a - b).norm() / (1 + b.norm())) for a, b in pairs), exchange.dispatch.goes_everywhere


def _all():
    return [_off(*case) for case in CASES]


def test_ranks_may_have_few_rows_or_none():
    for rank in run_ranks(2, _all):
        assert {everywhere for _, everywhere in rank} == {False, True}
        assert max(off for off, _ in rank) <= 1e-14
