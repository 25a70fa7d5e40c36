"""What travels for layers with a window: no query row, and each key and value row that is read elsewhere once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from distca.plan import AttentionKind, Layout, Links, Plan, PlanOptions, StepPlan, analytic_cost, plan_step, traffic
from distca.plan.cost.analytic import cost_of_kind

COST = analytic_cost(4, 2, 32)
FULL, WIDE, NARROW = (AttentionKind(1.0, window) for window in (0, 700, 50))


def _step(seed: int, kinds: tuple[AttentionKind, ...], stages: int = 1, *, resend: bool, links: Links) -> StepPlan:
    """Three micro-batches with documents shorter and longer than windows and than a rank; stages differ at equal
    depth."""
    random = np.random.default_rng(seed)
    lengths = [np.append(random.integers(1, 900, 9), random.integers(2000, 6000)) for _ in range(3)]
    layer_kinds = tuple(tuple((stage + layer) % len(kinds) for layer in range(3)) for stage in range(stages))
    costs = tuple(cost_of_kind(kind, COST) for kind in kinds)
    how = {"kinds": kinds, "costs": costs, "layer_kinds": layer_kinds}
    return plan_step(lengths, PlanOptions(4, costs[0], stages, nano_batches=2, resend=resend, links=links, **how))


def read_elsewhere(layouts: tuple[Layout, ...], half: int, window: int) -> int:
    """Rows that queries of a half see and that do not live on their rank, each once a rank; counted row by row."""
    total = 0
    for rank in range(layouts[0].ranks):
        queries = layouts[half].q.on_rank(rank)
        for document in np.unique(queries.document):
            seen, here = (np.zeros(layouts[0].last.max() + layouts[-1].last.max(), bool) for _ in range(2))
            for shards in (layout.q.on_rank(rank) for layout in layouts):
                for number, start, stop in zip(shards.document, shards.start, shards.stop, strict=True):
                    here[start:stop] |= number == document
            for number, start, stop in zip(queries.document, queries.start, queries.stop, strict=True):
                for query in range(start, stop) if number == document else ():
                    seen[max(query - window + 1, 0) : query + 1] = True
            total += int((seen & ~here).sum())
    return total


def _planned(step: StepPlan) -> Iterator[tuple[tuple[int | None, ...], tuple[int, ...], int, Plan]]:
    """Micro-batches and windows by stage, the half, its plan."""
    options = step.options
    for _, phase in step.phases:
        for kinds, plans in zip(options.combinations, phase.by_combination, strict=True):
            windows = tuple(options.windows[kind] for kind in kinds)
            for half, plan in enumerate(plans):
                yield phase.micro_batches, windows, half, plan


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("links", [Links(), Links(2)])
def test_windows_move_rows_before_each_shard_alone(seed: int, links: Links) -> None:
    step = _step(seed, (FULL, WIDE, NARROW), resend=seed % 2 == 1, links=links)
    moved = [0, 0]
    for (micro_batch,), (window,), half, plan in _planned(step):
        if not window:
            continue
        assert micro_batch is not None
        found = traffic(plan, links)
        assert found.q_rows == 0
        assert found.relay.total == 0
        assert found.kv_rows == read_elsewhere(step.layouts[micro_batch], half, window)
        moved[half] += found.kv_rows
    assert min(moved) > 0


@pytest.mark.parametrize("seed", range(2))
def test_stages_with_windows_move_them_beside_others_without(seed: int) -> None:
    step = _step(seed, (FULL, NARROW), 2, resend=True, links=Links())
    mixed = 0
    for micro_batches, windows, half, plan in _planned(step):
        of_stage = [0 if number is None else len(step.layouts[number][half].first) for number in micro_batches]
        window = np.repeat(windows, of_stage)
        expected = sum(
            read_elsewhere(step.layouts[number], half, each)
            for number, each in zip(micro_batches, windows, strict=True)
            if number is not None and each
        )
        q, kv = plan.q_reads, plan.kv_reads
        at_window = window[plan.tasks.document[q.task]] > 0
        assert (q.home == q.server)[at_window].all()
        away = (kv.home != kv.server) & (window[plan.contexts.last.document[kv.task]] > 0)
        assert kv.rows[away].sum() == expected
        mixed += 0 < np.count_nonzero(window) < len(window)
    assert mixed > 0


@pytest.mark.parametrize("resend", [False, True])
def test_layers_without_a_window_move_what_they_did(resend: bool) -> None:
    alone = _step(5, (FULL,), resend=resend, links=Links(2))
    beside = _step(5, (FULL, WIDE), resend=resend, links=Links(2))
    for (_, one), (_, two) in zip(alone.phases, beside.phases, strict=True):
        for own, other in zip(one.plans, two.plans, strict=True):
            for columns in zip(own.tasks.columns(), other.tasks.columns(), strict=True):
                np.testing.assert_array_equal(*columns)
            assert (traffic(own).q_rows, traffic(own).kv_rows) == (traffic(other).q_rows, traffic(other).kv_rows)
