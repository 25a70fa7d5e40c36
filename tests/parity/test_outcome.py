"""What counts as a difference; what the models compute is tested in tests/parity/test_parity.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distca.parity.outcome import Difference, Outcome, difference

REFERENCE = Outcome(2.0, {"first": torch.tensor([3.0, 4.0]).double(), "frozen": torch.zeros(2).double()})


def test_a_difference_is_that_of_the_loss_and_of_the_worst_gradient() -> None:
    assert difference(REFERENCE, REFERENCE) == Difference(0.0, 0.0, "first")
    other = Outcome(2.5, REFERENCE.gradients | {"first": torch.tensor([3.0, 4.5]).double()})
    assert difference(other, REFERENCE) == Difference(0.25, 0.1, "first")


@pytest.mark.parametrize("name", ["first", "frozen"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_is_out_of_every_tolerance(name: str, value: float) -> None:
    bad = replace(REFERENCE, gradients=REFERENCE.gradients | {name: torch.tensor([3.0, value]).double()})
    for found in (difference(bad, REFERENCE), difference(REFERENCE, bad)):
        assert max(found.loss, found.gradient) == math.inf and found.parameter == name


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_out_of_every_tolerance(value: float) -> None:
    bad = replace(REFERENCE, loss=value)
    for found in (difference(bad, REFERENCE), difference(REFERENCE, bad)):
        assert max(found.gradient, found.loss) == math.inf
