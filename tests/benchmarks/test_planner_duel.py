"""The duel's balancers deal every row once, and torch's rules are torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import planner_duel as duel
from distca.plan import Plan

LENGTHS = np.array([64, 16, 32, 8, 8])


def owner(plan: Plan) -> list[int]:
    """[tokens] the rank that computes each row of the packed sequence."""
    first = np.cumsum(LENGTHS) - LENGTHS
    found = np.full(int(LENGTHS.sum()), -1)
    tasks = plan.tasks
    for document, start, stop, server in zip(tasks.document, tasks.start, tasks.stop, tasks.server, strict=True):
        assert (found[first[document] + start : first[document] + stop] == -1).all()
        found[first[document] + start : first[document] + stop] = server
    return found.tolist()


def test_torchs_rules_are_torchs() -> None:
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    def theirs(tokens: int) -> list[int]:
        expected = torch.empty(tokens, dtype=torch.int64)
        indices = _HeadTailLoadBalancer(tokens, 4, "cpu")._generate_indices().flatten()
        expected[indices] = torch.arange(tokens) // (tokens // 4)
        return expected.tolist()

    assert owner(duel.torch_head_tail(LENGTHS, 4).parts[0]) == theirs(int(LENGTHS.sum()))
    each = [rank for tokens in LENGTHS.tolist() for rank in theirs(tokens)]
    assert owner(duel.torch_per_document(LENGTHS, 4).parts[0]) == each


@pytest.mark.parametrize("name", sorted(duel.BALANCERS))
def test_every_row_is_computed_once_and_figures_are_those_of_the_ranks(name: str) -> None:
    lengths = np.array([20_480, 6144, 3072, 1024, 1024, 512, 512])
    found = duel.BALANCERS[name](lengths, 4)
    rows = np.zeros(len(lengths), np.int64)
    for plan in found.parts:
        plan.check()
        rows_of = plan.tasks.stop - plan.tasks.start
        if name.startswith("Megatron"):
            assert rows_of.sum() == plan.layout.tokens
            continue
        rows += np.bincount(plan.tasks.document, rows_of, len(lengths)).astype(np.int64)
    assert sum(plan.layout.tokens for plan in found.parts) == lengths.sum()
    assert name.startswith("Megatron") or rows.tolist() == lengths.tolist()
    figures = duel.judged(found, lengths, 4)
    assert figures["step_over_mean"] >= 0.999 and figures["most_rows"] >= 1
    assert figures["busiest_kb_per_token"] * 4 >= figures["kb_per_token"]
