"""Rows that several tasks of one document share on a server: copied, and their gradients added up in one order."""

import pytest
import torch

from distca.plan import lay_out, route
from distca.runtime.device_routes import ServerRoute
from distca.runtime.server import fill_repeats, fold_repeats
from distca.testing.plans import random_plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_repeated_rows(dtype):
    of = route(random_plan(lay_out([40] * 12, 2)[0], 2, cuts=40), 0)
    repeat, there = of.kv.repeat, ServerRoute.of(of, "cpu")
    rows = [
        (source + row, target + row)
        for source, target, count in zip(repeat.source, repeat.destination, repeat.rows, strict=True)
        for row in range(count)
    ]
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(there.kv_rows, 2, 1, 3, generator=generator).to(dtype)
    filled, folded, expected = kv.clone(), kv.clone(), kv.to(torch.float32, copy=True)
    fill_repeats(filled, there)
    fold_repeats(folded, there)
    assert max(len(copies) for copies in there.repeats.values()) > 2 and len(there.repeats) > 2
    for source, target in sorted(rows):
        assert torch.equal(filled[target], kv[source])
        expected[source] += kv[target]
    assert torch.equal(folded, expected.to(dtype))
