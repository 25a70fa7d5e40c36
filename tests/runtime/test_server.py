"""Rows that several tasks of one document share on a server: copied, and their gradients added up in one order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from distca.plan import AttentionKind, lay_out, plan_at_home, route
from distca.runtime import device_routes
from distca.runtime.device_routes import ServerRoute
from distca.runtime.kept_rows import moved
from distca.runtime.server import added_up, task_regions
from distca.testing.plans import random_plan
from distca.testing.reference_attention import relative_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [0, 1, 9, 40])
@pytest.mark.parametrize("at_once", [True, False])
def test_shared_rows(dtype, window, at_once, monkeypatch):
    monkeypatch.setattr(device_routes, "_MOST_COPIES", 0)
    monkeypatch.setattr(device_routes.cuda_ops, "is_available", lambda: at_once)
    of = route(random_plan(lay_out([40] * 12, 2)[0], 2, cuts=40, window=window), 0)
    repeat, there = of.kv.repeat, ServerRoute.of(of, [AttentionKind(1.0)], "cpu")
    rows = [
        (source + row, target + row)
        for source, target, count in zip(repeat.source, repeat.destination, repeat.rows, strict=True)
        for row in range(count)
    ]
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(there.kv_rows, 2, 1, 3, generator=generator).to(dtype)
    regions = task_regions(kv, None, there)
    if window == 1:
        assert not there.repeats and len(regions) == len(kv)
        return
    assert max(len(each.places) for each in there.repeats) > 2 and len(there.repeats) > 2
    assert all((each.rows is None) != at_once for each in (there.copies[0], there.copies_back))
    assert sorted(target for _, target in rows) == list(range(len(regions)))
    assert len(regions) == of.cu_kv[-1] > len(kv)
    dkv = torch.randn(regions.shape, generator=generator).to(dtype)
    last = dict(sorted(rows))
    expected = torch.stack([dkv[last[source]] for source in range(len(kv))]).float()
    for source, target in sorted(rows):
        assert torch.equal(regions[target], kv[source])
        if target != last[source]:
            expected[source] += dkv[target]
    found = added_up(dkv, {}, there)
    if window:  # rows that the last task does not read have their sum in another order
        assert relative_error(found, expected) <= (3e-3 if dtype == torch.bfloat16 else 1e-7)
    else:
        assert torch.equal(found, expected.to(dtype))


def test_rows_that_no_tasks_share_are_not_copied():
    there = ServerRoute.of(
        route(random_plan(lay_out([40] * 4, 2, rank_of=[0, 0, 1, 1])[0], 2, cuts=0), 0), [AttentionKind(1.0)], "cpu"
    )
    kv = torch.zeros(there.kv_rows, 2, 1, 3)
    assert task_regions(kv, None, there) is kv and added_up(kv, {}, there) is kv


def test_query_rows_that_stay_in_their_places_are_not_copied():
    """At home no part of an exchange brings them; where some travel, or lie elsewhere at the server, one does."""
    layout = lay_out([13, 40, 29], 2)[0]
    q = torch.randn(64, 4, 6)
    for rank in range(2):
        home = ServerRoute.of(route(plan_at_home(layout), rank), [AttentionKind(1.0)], "cpu")
        for moves in (home.q_to_server, home.q_to_home):
            arriving, parts = moved(q[: home.q_rows], moves, home.q_rows)
            assert moves.in_place and not parts and arriving.data_ptr() == q.data_ptr()
        padded, parts = moved(q[: home.q_rows], home.q_to_home, home.q_rows + 1)
        assert parts and len(padded) == home.q_rows + 1
        away = ServerRoute.of(route(random_plan(layout, 3, 3, 0), rank), [AttentionKind(1.0)], "cpu")
        arriving, parts = moved(q[: int(layout.q_rows[rank])], away.q_to_server, away.q_rows)
        assert not away.q_to_server.in_place and len(parts) == 1 and arriving.data_ptr() != q.data_ptr()
    swapped = np.array([[0, 5, 5], [5, 0, 5]])
    assert not replace(home.q_to_server, keep_ranges=swapped, source_rows=10, destination_rows=10).in_place
