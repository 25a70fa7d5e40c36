from pathlib import Path

import pytest

from tests.train.launch.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine whose PATH has the system's tools, this Python and stand-ins."""
    return Machine(tmp_path)
