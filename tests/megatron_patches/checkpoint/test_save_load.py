"""Which checkpoints are refused before anything of them is loaded; what loads is tested with training."""

from pathlib import Path

import pytest

from distca.errors import VersionError
from megatron_patches.checkpoint import save_load


@pytest.mark.parametrize("older", [True, False])
def test_an_older_megatron_refuses_what_a_newer_one_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    monkeypatch.setattr(save_load, "find_spec", lambda name: older or None)
    if older:
        with pytest.raises(VersionError, match=r"was saved with a newer megatron-core than \d"):
            save_load._check_readable(tmp_path)
        (tmp_path / "common.pt").touch()
    save_load._check_readable(tmp_path)
