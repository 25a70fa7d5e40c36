"""NCCL's priority, as far as it can be tested without a GPU; tests/gpu/test_nccl.py has the rest."""

import os

import pytest

from distca.transport.collective import nccl_goes_first


@pytest.mark.parametrize("given, expected", [(None, "1"), ("0", "0")])
def test_nccl_goes_first_unless_told_otherwise(given, expected, monkeypatch):
    variable = "TORCH_NCCL_HIGH_PRIORITY"
    monkeypatch.setenv(variable, given or "")
    if given is None:
        monkeypatch.delenv(variable)
    nccl_goes_first()
    assert os.environ[variable] == expected
