from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from distca.commands.plan_results import (
    busiest_rank,
    draw,
    figures,
    lower_bound,
    most_received,
    seconds_by_home,
    shortest_shard,
    summary,
)
from distca.plan import AttentionKind, Links, MicroBatchPlan, analytic_cost, plan_micro_batch, route
from distca.plan.cost.analytic import cost_of_kind
from distca.words import format_bytes

COST = analytic_cost(32, 8, 128)


def made():
    # With homes given, query rows travel too.
    return plan_micro_batch([100_000, 4000, 6000, 900, 20_000], 4, COST, nano_batches=2, rank_of=[0, 1, 2, 3, 1])


def test_figures_agree_with_the_plan() -> None:
    found = made()
    console = Console(record=True, width=120)
    console.print(summary(found, layers=3))
    text = console.export_text()
    assert f"{found.imbalance_before:.3f}" in text
    assert f"{found.imbalance_after:.3f}" in text
    assert format_bytes(found.bytes_moved.q * 3) in text
    assert 0 < lower_bound(found) <= found.seconds_after.max()
    parts = [[route(nano.forward, rank) for rank in range(4)] for nano in found.nano_batches]
    received = [[p.q.receive.total * 8192 + p.kv.receive.total * 4096 for p in ranks] for ranks in parts]
    assert most_received(found) == np.max(received)
    assert 0 < shortest_shard(found) <= 100_000
    seconds = seconds_by_home(found)
    forward = sum(
        COST.forward(nano.forward.tasks.stop - nano.forward.tasks.start, nano.forward.tasks.stop).sum()
        for nano in found.nano_batches
    )
    np.testing.assert_allclose(seconds.sum(), forward)
    assert (seconds[np.eye(4) == 0] > 0).any()


@pytest.mark.parametrize("resend", [False, True])
def test_no_plan_is_below_the_bound_with_few_tokens_either(resend: bool) -> None:
    random = np.random.default_rng(1)
    for lengths in ([4], *(random.integers(1, 40, count).tolist() for count in (1, 2, 3, 5))):
        for ranks in (2, 5):
            found = plan_micro_batch(lengths, ranks, COST, nano_batches=2, resend=resend)
            assert lower_bound(found) <= found.seconds_after.max() * (1 + 1e-12), (lengths, ranks)


def test_servers_without_a_model_lower_the_bound() -> None:
    found = plan_micro_batch([100_000, 40_000, 60_000, 900], 4, COST, nano_batches=2, servers=2)
    alone = plan_micro_batch([100_000, 40_000, 60_000, 900], 4, COST, nano_batches=2)
    assert lower_bound(alone) / 2 < lower_bound(found) <= min(found.seconds_after.max(), lower_bound(alone) * 0.7)


def test_busiest_rank_nodes_and_halves_are_those_of_the_routes() -> None:
    documents, links = [100_000, 4000, 6000, 900, 20_000], Links(2)
    found = plan_micro_batch(documents, 4, COST, nano_batches=2, links=links)
    ranks, far, halves, relayed = np.zeros(4), 0, [], 0
    for nano in found.nano_batches:
        parts = [route(nano.forward, rank, links) for rank in range(4)]
        relays = [p.relay.send.total if p.relay is not None else 0 for p in parts]
        relays_in = [p.relay.receive.total if p.relay is not None else 0 for p in parts]
        out = [8192 * (p.q.send.total + p.q.receive.total) + 4096 * p.kv.send.total for p in parts]
        inward = [8192 * (p.q.send.total + p.q.receive.total) + 4096 * p.kv.receive.total for p in parts]
        out, inward = np.array(out) + 4096 * np.array(relays), np.array(inward) + 4096 * np.array(relays_in)
        ranks += np.maximum(out, inward)
        halves.append(int(out.sum()))
        relayed += sum(relays)
        for rank, part in enumerate(parts):
            q, kv = part.q.send.per_peer(4), part.kv.send.per_peer(4)
            other = np.arange(4) // 2 != rank // 2
            far += int(16384 * q[other].sum() + 4096 * kv[other].sum())
    assert relayed > 0
    assert busiest_rank(found).bytes == ranks.max() > 0
    assert busiest_rank(found).over_mean == pytest.approx(ranks.max() / ranks.mean())
    console = Console(record=True, width=140)
    console.print(summary(found, layers=3))
    text = console.export_text()
    assert "between 2 nodes, forward, 3 layers" in text and format_bytes(3 * far) in text
    assert f"{format_bytes(3 * halves[0])} and {format_bytes(3 * halves[1])}" in text
    one = plan_micro_batch(documents, 4, COST)
    console.print(summary(one))
    text = console.export_text()
    assert "nodes" not in text and "ping" not in text


def test_draw_makes_a_picture(tmp_path: Path) -> None:
    draw(made(), str(tmp_path / "x.svg"), "my lengths")
    text = (tmp_path / "x.svg").read_text()
    assert "my lengths: 5 documents, 130,900 tokens on 4 ranks" in text


def test_a_mixed_stack_shows_every_kind_and_means_over_its_layers() -> None:
    kinds = (AttentionKind(1.0), AttentionKind(1.0, window=1024))
    costs = tuple(cost_of_kind(kind, COST) for kind in kinds)
    found = plan_micro_batch(
        [100_000, 4000, 6000, 900, 20_000], 4, COST, nano_batches=2, kinds=kinds, costs=costs, layer_kinds=((0, 1, 1),)
    )
    text, each = summary_text(found), [found.of_kind(0), found.of_kind(1)]
    for name, kind in zip(("1 of 3 layers: full", "2 of 3 layers: window 1,024"), each, strict=True):
        assert name in text and f"{kind.imbalance_after:.3f}, {format_bytes(kind.bytes_moved.total)}" in text
    assert "layers: full" not in summary_text(each[0])
    moved = each[0].bytes_moved.kv + 2 * each[1].bytes_moved.kv
    assert figures(found, layers=3)["kv_bytes"] == moved
    mean = (seconds_by_home(each[0]) + 2 * seconds_by_home(each[1])) / 3
    np.testing.assert_allclose(seconds_by_home(found), mean)
    assert lower_bound(found) == pytest.approx((lower_bound(each[0]) + 2 * lower_bound(each[1])) / 3)
    assert lower_bound(each[1]) < lower_bound(each[0]) / 4
    assert most_received(found) == max(map(most_received, each))


def summary_text(found: MicroBatchPlan) -> str:
    console = Console(record=True, width=140)
    console.print(summary(found))
    return console.export_text()
