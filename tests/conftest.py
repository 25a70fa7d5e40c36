"""For all tests. Importing megatron_patches first lets Megatron-Core be imported without Triton."""

from hypothesis import settings

import megatron_patches  # noqa: F401

# No deadline per example: on a shared machine hypothesis would otherwise report its neighbours as flaky tests.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
