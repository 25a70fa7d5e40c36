from __future__ import annotations

import numpy as np
import pytest

from distca.data.sampler import shuffled
from distca.errors import DataError


def test_it_is_a_permutation_that_its_entropy_decides():
    assert np.array_equal(np.sort(shuffled(100, 1, 2)), np.arange(100))
    assert np.array_equal(shuffled(100, 1, 2), shuffled(100, 1, 2))
    assert not np.array_equal(shuffled(100, 1, 2), shuffled(100, 1, 3))
    assert not np.array_equal(shuffled(100, 1, 2), shuffled(100, 2, 1))


def test_the_order_is_the_same_for_every_numpy():
    # A saved run resumes in this order: if this fails, old checkpoints no longer resume exactly.
    assert shuffled(8, 1234, 0).tolist() == [5, 6, 3, 7, 4, 1, 2, 0]


def test_a_negative_seed_is_refused():
    with pytest.raises(DataError, match=r"not -3; change `seed`"):
        shuffled(4, -3)
