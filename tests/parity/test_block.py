"""What counts as an error of a block; what blocks compute is tested in tests/parity/test_parity.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distca.parity.block import BlockOutcome

ROWS = torch.tensor([[3.0, 4.0]])
REFERENCE = BlockOutcome(ROWS, ROWS, {"first": ROWS, "second": ROWS})
BAD = torch.tensor([[3.0, math.nan]])


def test_errors_are_relative_norms_and_the_worst_of_the_weights() -> None:
    assert set(REFERENCE.error(REFERENCE).values()) == {0.0}
    other = replace(REFERENCE, weight_gradients={"first": ROWS, "second": 1.5 * ROWS})
    assert other.error(REFERENCE) == {"output": 0.0, "input_gradient": 0.0, "weight_gradient": 0.5}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("output", {"output": BAD}),
        ("input_gradient", {"input_gradient": BAD}),
        ("weight_gradient", {"weight_gradients": {"first": BAD, "second": ROWS}}),
        ("weight_gradient", {"weight_gradients": {"first": ROWS, "second": BAD}}),
    ],
)
def test_what_is_no_number_is_out_of_every_tolerance(name: str, changes: dict) -> None:
    bad = replace(REFERENCE, **changes)
    for error in (bad.error(REFERENCE), REFERENCE.error(bad)):
        assert error[name] == math.inf == max(error.values())
