"""What suites make of errors; that they agree is tested in tests/parity/test_parity.py."""

from __future__ import annotations

from math import inf

from distca.parity.suite import ratios


def test_an_error_over_one_that_says_nothing_is_out_of_every_limit() -> None:
    assert ratios({"output": 0.3}, {"output": 0.2}) == {"output": 0.3 / 0.2}
    for ours, theirs in ((0.3, inf), (inf, inf), (inf, 0.2), (0.0, 0.0)):
        assert ratios({"output": ours}, {"output": theirs}) == {"output": inf}
