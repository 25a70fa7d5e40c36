"""Ranks that do not plan alike must end with a sentence, not wait for each other."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distca.plan import PlanError, analytic_cost, plan_micro_batch
from distca.plan.plan import fingerprint
from distca.testing.ranks import run_ranks
from distca.train.agreement import Agreement
from tests.train.small_runs import arguments, train_all, write_texts


def _plans(lengths: list[int], tolerance: float = 0.02) -> int:
    return fingerprint(plan_micro_batch(lengths, 3, analytic_cost(4, 2, 32), tolerance=tolerance).plans)


def test_the_fingerprint_tells_plans_apart() -> None:
    same = _plans([5000, 300, 1, 2049])
    assert same == _plans([5000, 300, 1, 2049])
    others = [_plans([5000, 300, 2, 2048]), _plans([300, 5000, 1, 2049]), _plans([5000, 300, 1, 2049], tolerance=0.5)]
    assert len({same, *others}) == 4


def _check(fingerprints: list[int]) -> str:
    agreement = Agreement(done=5)
    agreement.check(1)
    try:
        agreement.check(fingerprints[dist.get_rank()])
    except PlanError as error:
        return str(error)
    return ""


def test_every_rank_is_told_who_differs() -> None:
    assert run_ranks(3, _check, [5, 5, 5]) == [""] * 3
    said = run_ranks(3, _check, [5, 5, 4])
    assert len(set(said)) == 1
    assert "1 of 3 ranks (2) planned step 7 differently from rank 0" in said[0]


def _train_with_own_settings(lines: list[list[str]]) -> str:
    with pytest.raises(PlanError) as caught:
        train_all([lines[dist.get_rank()]])
    return str(caught.value)


def test_a_rank_that_was_started_with_other_settings_ends_the_run(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", [96, 90, 3, 2, 80, 70, 5, 4] * 4)
    lines = [arguments(output=tmp_path, data__path=texts, cad__enabled=enabled) for enabled in (True, False)]
    for said in run_ranks(2, _train_with_own_settings, lines, timeout=100):
        assert "planned step 1 differently from rank 0" in said
