from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from distca.data import open_source
from distca.errors import DataError

DOCUMENTS = [[[1, 2, 3], [4, 5]], [], [[6, 7, 8, 9]]]  # sequences of each document


def build(prefix, documents=DOCUMENTS, dtype=np.int32, vocabulary=10):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    if vocabulary:
        prefix.with_suffix(".json").write_text(json.dumps({"vocabulary": vocabulary}))
    return str(prefix)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_documents_of_several_sequences_are_read_in_any_slice(tmp_path, dtype):
    source = open_source("indexed", build(tmp_path / "d", dtype=dtype))
    assert source.lengths.tolist() == [5, 4]  # the empty document is left out
    assert source.vocabulary == 10
    for document, content in enumerate(([1, 2, 3, 4, 5], [6, 7, 8, 9])):
        for start in range(len(content) + 1):
            for stop in range(start, len(content) + 1):
                tokens = source.read(document, start, stop)
                assert tokens.tolist() == content[start:stop]
                assert tokens.dtype == np.int64


def test_the_suffix_may_be_given(tmp_path):
    build(tmp_path / "d")
    assert open_source("indexed", str(tmp_path / "d.idx")).lengths.tolist() == [5, 4]


def test_the_vocabulary_comes_from_the_sidecar_or_the_setting(tmp_path):
    prefix = build(tmp_path / "d", vocabulary=None)
    with pytest.raises(DataError, match=r"vocabulary of .* is not known \(d\.json is missing\); set `vocabulary`"):
        open_source("indexed", prefix)
    assert open_source("indexed", prefix, vocabulary=77).vocabulary == 77
    prefix = build(tmp_path / "e")
    assert open_source("indexed", prefix, vocabulary=77).vocabulary == 77
    with pytest.raises(DataError, match=r"`vocabulary` is 9, but .* made with 10 token ids; set it to 10 or more"):
        open_source("indexed", prefix, vocabulary=9)


def test_a_damaged_sidecar_is_a_sentence(tmp_path):
    prefix = build(tmp_path / "d")
    (tmp_path / "d.json").write_text("{")
    with pytest.raises(DataError, match=r'd\.json is not a JSON object with a "vocabulary" number'):
        open_source("indexed", prefix)


def test_an_id_outside_the_vocabulary_is_a_sentence(tmp_path):
    source = open_source("indexed", build(tmp_path / "d", vocabulary=None), vocabulary=9)
    assert source.read(1, 0, 3).tolist() == [6, 7, 8]
    with pytest.raises(DataError, match=r"token id 9 in document 1, but the vocabulary has 9 ids; set `vocabulary`"):
        source.read(1, 0, 4)


def test_missing_files_are_sentences(tmp_path):
    with pytest.raises(DataError, match=r"Neither .*d\.idx nor .*d\.bin exists"):
        open_source("indexed", str(tmp_path / "d"))
    prefix = build(tmp_path / "d")
    (tmp_path / "d.bin").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"d\.idx exists but .*d\.bin does not"):
        open_source("indexed", prefix)
    (tmp_path / "away").rename(tmp_path / "d.bin")
    (tmp_path / "d.idx").unlink()
    with pytest.raises(DataError, match=r"d\.bin exists but .*d\.idx does not"):
        open_source("indexed", prefix)


def test_damaged_files_are_sentences(tmp_path):
    prefix = build(tmp_path / "d")
    index, tokens = tmp_path / "d.idx", tmp_path / "d.bin"
    good = index.read_bytes()

    def refused(content, message):
        index.write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_source("indexed", prefix)

    refused(b"not an index", "is not an index of Megatron's")
    refused(b"X" * 100, "is not an index of Megatron's")
    refused(good[:9] + struct.pack("<Q", 2) + good[17:], "has format version 2")
    refused(good[:-3], "is cut off: it announces 3 sequences")
    refused(good[:17] + b"\x63" + good[18:], "names number type 99, which is no integer type")
    refused(good[:17] + b"\x06" + good[18:], "names number type 6, which is no integer type")
    borders = struct.pack("<4q", 0, 2, 2, 1)  # the last one must be the number of sequences
    refused(good[:-32] + borders, "cannot be read: its counts contradict each other")
    refused(good[:-32] + struct.pack("<4q", 0, 2, 1, 3), "its documents are not in order")
    refused(good[:34] + struct.pack("<i", -3) + good[38:], "it holds negative lengths or offsets")
    index.write_bytes(good)
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"d\.bin is cut off: 32 bytes instead of 36"):
        open_source("indexed", prefix)


def test_files_of_another_corpus_are_sentences(tmp_path):
    prefix = build(tmp_path / "d")
    build(tmp_path / "e", documents=[*DOCUMENTS, [[1]]])
    tokens, sidecar = tmp_path / "d.bin", tmp_path / "d.json"
    good = tokens.read_bytes()
    tokens.write_bytes((tmp_path / "e.bin").read_bytes())
    with pytest.raises(DataError, match=r"d\.bin is of another corpus than .*d\.idx: 40 bytes instead of 36; copy"):
        open_source("indexed", prefix)
    tokens.write_bytes(good)
    sidecar.write_text(json.dumps({"vocabulary": 10, "documents": 3, "tokens": 9}))
    assert open_source("indexed", prefix).lengths.tolist() == [5, 4]
    for said, message in (({"documents": 4}, "4 documents instead of 3"), ({"tokens": 10}, "10 tokens instead of 9")):
        sidecar.write_text(json.dumps({"vocabulary": 10} | said))
        with pytest.raises(DataError, match=rf"d\.json is of another corpus than .*d\.idx: {message}; copy"):
            open_source("indexed", prefix)


def test_a_mask_that_is_missing_is_a_sentence(tmp_path):
    prefix, (sidecar, mask) = build(tmp_path / "d"), (tmp_path / "d.json", tmp_path / "d.mask")
    for said in ({"mask": True}, {"chat_template": "x"}, {"mask": True, "chat_template": "", "tool_use": "x"}):
        sidecar.write_text(json.dumps({"vocabulary": 10} | said))
        with pytest.raises(DataError, match=r"d\.mask is missing, .*; copy it beside the others, or convert again"):
            open_source("indexed", prefix)
        mask.write_bytes(bytes([0, 1, 1, 1, 1, 0, 0, 1, 1]))
        assert open_source("indexed", prefix).learned(1, 0, 4).tolist() == [False, False, True, True]
        mask.unlink()
    sidecar.write_text(json.dumps({"vocabulary": 10, "mask": False}))
    assert not open_source("indexed", prefix).masked


def test_a_pair_without_tokens_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match="holds no document with tokens"):
        open_source("indexed", build(tmp_path / "d", documents=[[]]))
