"""Ranks that do not plan alike must end with a sentence, not wait for each other."""

from collections.abc import Callable, Iterator

import torch.distributed as dist

from distca.cluster import agreement as module
from distca.cluster.agreement import Agreement, Fingerprint, on_all_ranks
from distca.errors import DistcaError
from distca.plan import analytic_cost, plan_micro_batch
from distca.plan.plan import fingerprint
from distca.testing.ranks import run_ranks

agreement: Agreement


def _plans(lengths: list[int], tolerance: float = 0.02) -> int:
    return fingerprint(plan_micro_batch(lengths, 3, analytic_cost(4, 2, 32), tolerance=tolerance).plans)


def test_the_fingerprint_tells_plans_apart() -> None:
    same = _plans([5000, 300, 1, 2049])
    assert same == _plans([5000, 300, 1, 2049])
    others = [_plans([5000, 300, 2, 2048]), _plans([300, 5000, 1, 2049]), _plans([5000, 300, 1, 2049], tolerance=0.5)]
    assert len({same, *others}) == 4


def _steps(planned: list[int | str]) -> str:
    """What a rank says; it plans its steps one after the other, of which a word stands for what it cannot plan."""

    def plan() -> Iterator[int]:
        for step in planned:
            if isinstance(step, str):
                raise ValueError(step)
            yield step

    try:
        list(agreement.on(plan(), Fingerprint, first=6))
    except ValueError as error:
        return str(error)
    return ""


def _all_cases() -> list[str]:
    global agreement
    agreement = Agreement()
    module._FIRST_WORD_S = 0.0
    third = dist.get_rank() == 2
    steps = [[1, 5], [1, 4 if third else 5], [1, "no"] if third else [1, 5], [1][third:]]
    return [*map(_steps, steps), _checked(lambda: "" if not third else str(1 // 0)), _checked(lambda: str(third))]


def _checked(check: Callable[[], str]) -> str:
    try:
        return on_all_ranks(check)
    except (DistcaError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"


def test_every_rank_is_told_who_differs() -> None:
    same, differs, fails, ends, refuses, passes = zip(*run_ranks(3, _all_cases), strict=True)
    assert same == ("",) * 3
    assert len(set(differs)) == 1
    assert "1 of 3 ranks (2) planned step 7 differently from rank 0" in differs[0]
    assert fails == ("Rank 2 could not plan step 7: ValueError: no",) * 2 + ("no",)
    divided = "ZeroDivisionError: integer division or modulo by zero"
    assert refuses == (f"SupportError: Rank 2 refuses: {divided}",) * 2 + (divided,)
    assert passes == ("False", "False", "True")
    assert ends == ("1 of 3 ranks (2) ended before step 6, which the others planned.",) * 3
