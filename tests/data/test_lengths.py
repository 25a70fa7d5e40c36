from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from distca.commands.data import convert, describe
from distca.commands.lengths import read_data
from distca.commands.plan import plan
from distca.data.lengths import open_lengths
from distca.data.sampler import Sampler
from distca.errors import DataError

SIZES = (5, 0, 700, 40)


@pytest.fixture
def folder(tmp_path):
    lines = "".join(json.dumps({"text": "a" * size, "body": "ä"}) + "\n" for size in SIZES)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "blend.yaml").write_text(
        "- {source: jsonl, path: a.jsonl, epochs: 2}\n- {source: jsonl, path: b.jsonl.gz, field: body, epochs: 1}\n"
    )
    return tmp_path


def test_lengths_are_bytes_of_texts_that_have_some(folder):
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert open_lengths("jsonl", str(folder / name)).lengths.tolist() == [5, 700, 40]
        assert open_lengths("jsonl", str(folder / name), field="body").lengths.tolist() == [2] * 4
    (folder / "empty.jsonl.gz").write_bytes(gzip.compress(b'{"text": ""}\n'))
    with pytest.raises(DataError, match="holds no document with text in 'text'"):
        open_lengths("jsonl", str(folder / "empty.jsonl.gz"))


@pytest.mark.parametrize("value", ["null", "5", '["a"]', '"\\ud800"'])
def test_a_value_that_is_no_text_is_not_the_tokenizers_fault(folder, value):
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": %s}\n' % value.encode()))
    with pytest.raises(DataError, match=r"c\.jsonl\.gz, line 2: (its|the) .text. .*; correct or remove it, name") as no:
        open_lengths("jsonl", str(folder / "c.jsonl.gz"))
    assert "tokenize" not in str(no.value)


def test_tables_have_lengths_too(folder):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a" * size for size in SIZES]}), folder / "a.parquet")
    found = open_lengths("parquet", str(folder / "a.parquet")).lengths
    assert found.tolist() == [5, 700, 40] and found.dtype == np.int64


def test_a_blend_is_described_as_an_epoch_has_it(folder, capsys):
    describe(str(folder / "blend.yaml"), source="blend")
    said = capsys.readouterr().out
    assert "all 10 documents" in said and "1,498" in said  # 2 × (5 + 700 + 40) + 4 × 2


def test_a_plan_takes_the_first_micro_batch_of_training_data(folder, capsys):
    data = f"jsonl:{folder / 'b.jsonl.gz'}"
    assert read_data(data, longest=300).tolist() == [5, 300, 300, 100, 40]
    assert read_data("pretrain", longest=300) is None
    plan(data, ranks=2, tokens_per_rank=150)
    first = Sampler(np.array([5, 300, 300, 100, 40]), 2, 150, 1, seed=0).next()[0]
    said = f"{len(first.lengths)} documents, {first.tokens} tokens on 2 ranks"
    assert 200 < first.tokens <= 300 and said in capsys.readouterr().out


def test_lengths_need_no_vocabulary(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n{"text": "you"}\n')
    convert(str(tmp_path / "a.jsonl"), source="jsonl", output=str(tmp_path / "a"))
    (tmp_path / "a.json").unlink()
    assert read_data(f"indexed:{tmp_path / 'a'}", longest=4).tolist() == [4, 1, 3]


def test_a_plan_names_what_it_can_be_given(folder):
    (folder / "c.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match="field, as the sources of a blend:PATH can, or set --bad of distca data conv"):
        read_data(f"jsonl:{folder / 'c.jsonl'}", longest=9)
    with pytest.raises(DataError, match=r"^PATH '.*nowhere' does not exist"):
        read_data(f"jsonl:{folder / 'nowhere'}", longest=9)
