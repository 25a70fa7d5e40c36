"""No deadline per example: on a shared machine hypothesis would otherwise report its neighbours as flaky tests."""

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
