"""Ranks that do not plan alike must end with a sentence, not wait for each other."""

import torch.distributed as dist

from distca.cluster.agreement import Agreement
from distca.errors import PlanError
from distca.plan import analytic_cost, plan_micro_batch
from distca.plan.plan import fingerprint
from distca.testing.ranks import run_ranks


def _plans(lengths: list[int], tolerance: float = 0.02) -> int:
    return fingerprint(plan_micro_batch(lengths, 3, analytic_cost(4, 2, 32), tolerance=tolerance).plans)


def test_the_fingerprint_tells_plans_apart() -> None:
    same = _plans([5000, 300, 1, 2049])
    assert same == _plans([5000, 300, 1, 2049])
    others = [_plans([5000, 300, 2, 2048]), _plans([300, 5000, 1, 2049]), _plans([5000, 300, 1, 2049], tolerance=0.5)]
    assert len({same, *others}) == 4


def _check(fingerprints: list[int]) -> str:
    steps = Agreement()
    steps.next_step = 6
    steps.check(1)
    try:
        steps.check(fingerprints[dist.get_rank()])
    except PlanError as error:
        return str(error)
    return ""


def test_every_rank_is_told_who_differs() -> None:
    assert run_ranks(3, _check, [5, 5, 5]) == [""] * 3
    said = run_ranks(3, _check, [5, 5, 4])
    assert len(set(said)) == 1
    assert "1 of 3 ranks (2) planned step 7 differently from rank 0" in said[0]
