"""What suites make of errors; that they agree is tested in tests/parity/test_parity.py."""

from __future__ import annotations

from math import inf

import pytest

from distca.parity.suite import pooled, ratios


def test_an_error_over_one_that_says_nothing_is_out_of_every_limit() -> None:
    assert ratios({"output": 0.3}, {"output": 0.2}) == {"output": 0.3 / 0.2}
    for ours, theirs in ((0.3, inf), (inf, inf), (inf, 0.2), (0.0, 0.0)):
        assert ratios({"output": ours}, {"output": theirs}) == {"output": inf}


def test_seeds_count_by_root_mean_squares() -> None:
    lucky, unlucky = ({"ratio": ({"output": ours}, {"output": 3.0})} for ours in (3.0, 4.0))
    assert pooled([unlucky]) == {"output_ratio": 4 / 3}
    assert pooled([unlucky, lucky]) == {"output_ratio": pytest.approx((12.5 / 9) ** 0.5)}
    assert pooled([lucky, {"ratio": ({"output": inf}, {"output": 3.0})}]) == {"output_ratio": inf}
