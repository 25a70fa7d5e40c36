"""Ranks for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.testing.worlds import Worlds


@pytest.fixture(scope="package")
def worlds() -> Iterator[Worlds]:
    """Shared by all files that one process of pytest runs."""
    worlds = Worlds()
    yield worlds
    worlds.close()
