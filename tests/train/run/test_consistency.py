"""Ranks that do not start or plan alike must end with a sentence, not wait for each other."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distca.errors import ConfigError, PlanError
from distca.plan import analytic_cost, plan_micro_batch
from distca.plan.plan import fingerprint
from distca.testing.ranks import run_ranks
from distca.train.run import consistency
from distca.train.run.consistency import Agreement
from tests.train.small_runs import arguments, train_all, write_texts


def _plans(lengths: list[int], tolerance: float = 0.02) -> int:
    return fingerprint(plan_micro_batch(lengths, 3, analytic_cost(4, 2, 32), tolerance=tolerance).plans)


def test_the_fingerprint_tells_plans_apart() -> None:
    same = _plans([5000, 300, 1, 2049])
    assert same == _plans([5000, 300, 1, 2049])
    others = [_plans([5000, 300, 2, 2048]), _plans([300, 5000, 1, 2049]), _plans([5000, 300, 1, 2049], tolerance=0.5)]
    assert len({same, *others}) == 4


def _check(fingerprints: list[int]) -> str:
    steps = Agreement(done=5)
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


def _train_with_own_settings(lines: list[list[str]], compared: bool) -> str:
    if not compared:
        consistency.by_setting = lambda _: {}  # type: ignore[assignment]
    with pytest.raises(ConfigError if compared else PlanError) as caught:
        train_all([lines[dist.get_rank()]])
    return str(caught.value)


@pytest.mark.parametrize(
    "setting, values, compared, said",
    [
        ("optimizer__lr", (0.01, 0.02), True, "Rank 1 was started with optimizer.lr 0.02, rank 0 with 0.01"),
        ("train__steps", (6, 7), True, "Rank 1 was started with train.steps 7, rank 0 with 6"),
        ("data__path", ("texts", "fewer"), True, "Ranks [1] see other documents than rank 0"),
        ("cad__enabled", (True, False), False, "planned step 1 differently from rank 0"),
    ],
)
def test_a_rank_that_was_started_otherwise_ends_the_run(
    tmp_path: Path, setting: str, values: tuple[object, object], compared: bool, said: str
) -> None:
    lengths = [96, 90, 3, 2, 80, 70, 5, 4] * 4
    texts = write_texts(tmp_path / "texts", lengths)
    write_texts(tmp_path / "fewer", lengths[:-1])
    lines = []
    for value in values:
        own = {setting: tmp_path / value if isinstance(value, str) else value}
        lines.append(arguments(**({"output": tmp_path, "data__path": texts} | own)))
    for heard in run_ranks(2, _train_with_own_settings, lines, compared, timeout=100):
        assert said in heard
