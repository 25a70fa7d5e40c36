"""Lines that no user can act upon stay out of the log; others of the same modules do not."""

import logging

import pytest

from megatron_patches.versions import _DROPPED, drop_log_lines


@pytest.mark.parametrize("name", _DROPPED)
def test_only_the_named_line_is_dropped(name: str, caplog: pytest.LogCaptureFixture) -> None:
    drop_log_lines()
    drop_log_lines()
    for line in (f"{_DROPPED[name]} and more", "another"):
        logging.getLogger(name).warning(line)
    assert caplog.messages == ["another"]
