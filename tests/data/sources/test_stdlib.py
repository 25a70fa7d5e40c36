from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distca.data import open_source
from distca.data.sources import text as stdlib
from distca.errors import DataError


@pytest.fixture(scope="module")
def source():
    return open_source("stdlib")


def test_a_document_is_a_module_of_this_python_byte_for_byte(source):
    document = source.files.index(Path(json.__file__))
    content = Path(json.__file__).read_bytes()
    assert source.lengths[document] == len(content)
    assert bytes(source.read(document, 0, len(content)).tolist()) == content
    assert bytes(source.read(document, 10, 30).tolist()) == content[10:30]
    assert source.read(document, 5, 5).tolist() == []


def test_documents_are_sorted_and_nothing_installed_is_among_them(source):
    folder = Path(json.__file__).parent.parent
    names = [file.relative_to(folder).as_posix() for file in source.files]
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if "site-packages" in name or "__pycache__" in name]


def test_lengths_are_real_and_varied(source):
    assert source.vocabulary == 256
    assert source.lengths.dtype == np.int64
    assert source.lengths.min() >= 1
    assert source.lengths.max() > 5 * np.median(source.lengths)
    assert len(source.lengths) > 300


def test_a_python_without_source_files_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"no \.py files.*set `source` to text"):
        open_source("stdlib")
