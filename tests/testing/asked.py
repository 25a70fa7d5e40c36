"""Which cases of a file run this time, for what computes several of them in one start of ranks."""

from __future__ import annotations

from typing import Any

import pytest


def asked(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """The values of a parameter with which tests of the fixture's file run, without those that a marker leaves out."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return {call.params[parameter] for call in calls if call is not None and parameter in call.params}
