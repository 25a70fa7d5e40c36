"""The relative error that tests of numbers use; direct attention is tested in tests/attention/test_reference.py."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from distca.testing.reference_attention import relative_error


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], inf),
        ([nan, 1.0], [1.0, 1.0], inf),
        ([1.0, 1.0], [nan, 1.0], inf),
        ([inf], [1.0], inf),
        ([1.0], [inf], inf),
        ([inf], [inf], inf),
    ],
)
def test_what_is_no_finite_number_is_infinitely_far(actual: list[float], expected: list[float], error: float) -> None:
    assert relative_error(torch.tensor(actual), torch.tensor(expected)) == error
