"""The same documents from every kind of file, through blocks that are smaller than a document."""

from __future__ import annotations

import gzip
import json

import pytest

from distca.data.texts import blocks, lines, open_texts, opening, tables
from distca.errors import DataError

TEXTS = ["one", "", "zwölf\nlines", "x" * 300, "😀 end"]


def write_lines(folder, texts=TEXTS):
    folder.mkdir(exist_ok=True)
    content = b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)
    return content[:-1]  # the last line has no end


def write_tables(folder, texts=TEXTS):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = arrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    (folder / "saved").mkdir()
    saved = str(folder / "saved" / "data-00000-of-00001.arrow")
    with arrow.OSFile(saved, "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    (folder / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')


def documents(texts, field="text"):
    """(where, value as text) of all, and bytes read."""
    found, read = [], 0
    for block in texts.blocks(field):
        found += [
            (where, value.decode() if isinstance(value, bytes) else value) for where, value in block.documents(field)
        ]
        read += block.read
    return found, read


@pytest.fixture
def small_blocks(monkeypatch):
    for module in (blocks, lines, opening):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(tables, "_ROWS", 2)


@pytest.mark.parametrize("kind", ["plain", "gz", "zst", "zst, two frames", "parquet", "arrow", "text"])
def test_all_kinds_hold_the_same(tmp_path, small_blocks, kind):
    content = write_lines(tmp_path)
    source, path, where = "jsonl", tmp_path / "a.jsonl", "a.jsonl, line {}"
    if kind == "plain":
        path.write_bytes(content)
    elif kind == "gz":
        path, where = tmp_path / "a.json.gz", "a.json.gz, line {}"
        path.write_bytes(gzip.compress(content[:70]) + gzip.compress(content[70:]))
    elif kind.startswith("zst"):
        pack = pytest.importorskip("zstandard").ZstdCompressor().compress
        path, where = tmp_path / "a.jsonl.zst", "a.jsonl.zst, line {}"
        path.write_bytes(pack(content) if kind == "zst" else pack(content[:70]) + pack(content[70:]))
    elif kind == "text":
        source, path, where = "text", tmp_path / "texts", "{:02d}.txt"
        path.mkdir()
        for number, text in enumerate(TEXTS, 1):
            (path / f"{number:02d}.txt").write_bytes(text.encode())
    else:
        write_tables(tmp_path)
        source, path = kind, tmp_path / ("a.parquet" if kind == "parquet" else "saved")
        where = "a.parquet, row {}" if kind == "parquet" else "data-00000-of-00001.arrow, row {}"
    texts = open_texts(source, str(path))
    found, read = documents(texts)
    numbers = [1, 3, 4, 5] if kind == "text" else [1, 2, 3, 4, 5]  # an empty file is no document
    assert [value for _, value in found] == [TEXTS[number - 1] for number in numbers]
    assert [place.rsplit("/", 1)[1] for place, _ in found] == [where.format(number) for number in numbers]
    assert texts.bytes - 8 <= read <= texts.bytes  # an Arrow stream ends with eight bytes that are no row's


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "2"}')
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"text": "1"}'))
    (tmp_path / "c.json").write_text("no lines")
    assert [value for _, value in documents(open_texts("jsonl", str(tmp_path)))[0]] == ["1", "2"]


def test_what_identifies_texts(tmp_path):
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    a, b, c = (open_texts("jsonl", str(tmp_path / f"{name}.jsonl")) for name in "abc")
    assert a.digest() == b.digest() != c.digest()
    assert a.state() != b.state()


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_a_damaged_file_is_a_sentence(tmp_path, suffix, harm):
    pack = gzip.compress if suffix == "gz" else pytest.importorskip("zstandard").ZstdCompressor().compress
    packed = bytearray(pack(write_lines(tmp_path) * 9))
    if harm == "cut":
        del packed[-20:]
    else:
        packed[:4] = b"----"
    file = tmp_path / f"a.jsonl.{suffix}"
    file.write_bytes(packed)
    with pytest.raises(DataError, match=rf"a\.jsonl\.{suffix} is cut off or damaged \(.+\); copy or pack it again"):
        documents(open_texts("jsonl", str(file)))


def test_a_table_may_be_a_folder_with_the_suffix_as_spark_writes_it(tmp_path):
    write_tables(tmp_path)
    (tmp_path / "all" / "web.parquet").mkdir(parents=True)
    (tmp_path / "a.parquet").rename(tmp_path / "all" / "web.parquet" / "part-0.parquet")
    assert [file.name for file in open_texts("parquet", str(tmp_path / "all")).files] == ["part-0.parquet"]


def test_files_beside_tables_are_counted_once(tmp_path, caplog):
    write_tables(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "a.parquet").rename(tmp_path / "more" / "a.parquet")
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert [file.name for file in open_texts("parquet", str(tmp_path)).files] == ["a.parquet"]
    assert caplog.text.count("left out 2 files; only .parquet files are taken") == 1


def test_a_damaged_table_is_a_sentence(tmp_path):
    write_tables(tmp_path)
    for kind, path in (("parquet", "a.parquet"), ("arrow", "saved/data-00000-of-00001.arrow")):
        file = tmp_path / path
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(DataError, match=rf"is no {kind.capitalize()} file that can be read \(.+\); copy it again"):
            documents(open_texts(kind, str(file.parent if kind == "arrow" else file)))


@pytest.mark.parametrize(
    ("kind", "path", "field", "said"),
    [
        ("parquet", "a.parquet", "body", r"a\.parquet has no column 'body', but id, text; set `field`"),
        ("arrow", "saved", "body", r"arrow has no column 'body', but id, text; set `field`"),
        ("jsonl", "none", "text", "`path` .* does not exist"),
        ("parquet", "texts", "text", r"holds no \.parquet file"),
        ("arrow", "texts", "text", r"is no folder that the library datasets saved to disk"),
        ("arrow", "splits", "text", r"holds the splits train, test; set `path` to one of them, such as .*splits/train"),
        ("jsonl", None, "text", "needs a path"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path, kind, path, field, said):
    (tmp_path / "a.jsonl").write_bytes(write_lines(tmp_path))
    write_tables(tmp_path)
    for folder in ("texts", "splits"):
        (tmp_path / folder).mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=said):
        documents(open_texts(kind, str(tmp_path / path) if path else None), field)


def test_what_cannot_be_read_is_said_in_its_place(tmp_path):
    write_tables(tmp_path, ["one", None, "three"])
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": \n{"text": "three"}\n')
    for kind, wrong in (("parquet", "row 2 has nothing in 'text'; take"), ("jsonl", "line 2: this is not valid JSON")):
        (first, second, third), _ = documents(open_texts(kind, str(tmp_path / f"a.{kind}")))
        assert (first[1], third[1]) == ("one", "three")
        assert f"a.{kind}, {wrong}" in str(second[1].error())
