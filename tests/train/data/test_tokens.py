"""Tests distca/train/data/tokens.py: what is refused before ranks start, and what rank 0 does for the others."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from distca.data.convert import convert
from distca.data.recipe import Recipe
from distca.data.texts import open_texts
from distca.data.tokenizer import find_tokenizer
from distca.errors import DataError, DistcaError
from distca.train.config.cli import parse_run_config
from distca.train.data import tokens
from distca.train.data.corpus import dealt, document_weights, open_corpus, open_sampler
from distca.train.run.main import _check
from tests.models.tokenizer import write_tokenizer
from tests.train.small_runs import arguments

TALK = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]


@pytest.fixture
def root(tmp_path):
    write_tokenizer(tmp_path)
    for name, field, value in (("texts", "text", "some text"), ("talks", "messages", TALK)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({field: value}) + "\n") * 20)
    return tmp_path


def config(root, source="jsonl", path="texts.jsonl", **settings):
    chosen = {"output": root / "runs", "data__tokenizer": root} | settings
    return parse_run_config(arguments(data__source=source, data__path=root / path, **chosen))


def test_the_first_start_makes_tokens_and_a_check_makes_none(root, caplog):
    asked = config(root)
    assert tokens.find_tokens(asked) is None and not (root / "runs").exists()
    with caplog.at_level(logging.INFO, logger="distca"):
        corpus = open_corpus(asked)
    assert "Texts begin with '<|begin|>' and end with '<|end|>' of the tokenizer" in caplog.text
    assert corpus.vocabulary == 258 and corpus.train.lengths.tolist() == [11] * 18
    assert bytes(corpus.train.read(0, 1, 3).tolist()) != b"so", "ids of the tokenizer, not bytes"
    assert corpus.train.read(0, 0, 11)[[0, 10]].tolist() == [256, 257]
    assert tokens.find_tokens(asked) == [tokens.caches(asked)[0].find()] != [None]
    assert list((root / "runs").iterdir()) == [root / "runs" / "tokens"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data__tokenizer": "nowhere"}, "The tokenizer 'nowhere' is neither 'bytes' nor a tokenizer.json"),
        ({"model__vocabulary": 200}, "model.vocabulary is 200, but the data uses 258 tokens"),
        ({"data__field": "body"}, 'line 1: this JSON object has no "body"; its fields are text'),
        ({"path": "bad.jsonl"}, 'bad.jsonl, line 7: this JSON object has no "text"; its fields are body'),
        ({"path": "bad.jsonl.gz"}, "bad.jsonl.gz is cut off or damaged"),
        ({"path": "nothing.jsonl"}, "does not exist"),
        ({"data__conversations": True}, 'line 1: this JSON object has no "messages"'),
        ({"data__conversations": True, "data__field": "text"}, "a conversation is a list of messages"),
        ({"data__conversations": True, "data__tokenizer": "bytes"}, "Conversations need a chat template"),
        ({"data__end_token": "</s>"}, "The tokenizer has no token '</s>' to end documents with"),
        ({"source": "blend", "path": "texts.jsonl"}, "texts.jsonl is not valid YAML"),
        ({"source": "parquet", "path": "texts.jsonl"}, "is no Parquet file that can be read"),
        ({"source": "mix", "path": "prolong", "data__bad": "skip"}, "data.bad is skip, but data.source is mix, whose"),
    ],
)
def test_mistakes_are_sentences_before_ranks_start(root, settings, said):
    (root / "bad.jsonl").write_text('{"text": "fine"}\n' * 6 + '{"body": "?"}\n')
    (root / "bad.jsonl.gz").write_bytes(gzip.compress((root / "texts.jsonl").read_bytes())[:-9])
    with pytest.raises(DistcaError) as refused:
        _check(config(root, **settings), 4)
    assert said in str(refused.value)
    assert not (root / "runs" / "tokens").exists()


def test_a_template_that_fails_is_a_sentence(root):
    (root / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with pytest.raises(DataError, match=r"talks\.jsonl, line 1 cannot be tokenized.*chat template fails: no system"):
        _check(config(root, path="talks.jsonl", data__conversations=True), 4)


def test_a_blend_of_files_and_tokens(root):
    open_corpus(config(root))
    prefix = tokens.caches(config(root))[0].find()
    blend, indexed = root / "blend.yaml", f"- {{source: indexed, path: {prefix}, epochs: 1}}\n"
    blend.write_text(indexed)
    for name, value, shown in (("conversations", True, "true"), ("end_token", "</s>", "</s>"), ("bad", "skip", "skip")):
        with pytest.raises(DataError, match=f"`{name}` is {shown}, but all sources of .* are indexed, whose"):
            tokens.find_tokens(config(root, "blend", "blend.yaml", **{f"data__{name}": value}))
    blend.write_text("- {source: jsonl, path: talks.jsonl, field: messages, epochs: 2}\n" + indexed)
    with pytest.raises(DataError, match='its "messages" is no text'):
        open_corpus(config(root, "blend", "blend.yaml"))
    blend.write_text("- {source: jsonl, path: texts.jsonl, epochs: 2}\n" + indexed)
    asked = config(root, "blend", "blend.yaml", data__validation_fraction=0)
    assert open_corpus(asked).train.tokens == 11 * (2 * 20 + 20)


def test_every_source_of_a_blend_is_looked_at_before_ranks_start(root):
    lines = ["- {source: jsonl, path: texts.jsonl, epochs: 1}\n", "- {source: jsonl, path: talks.jsonl, epochs: 1}\n"]
    for order in (lines, lines[::-1]):
        (root / "blend.yaml").write_text("".join(order))
        with pytest.raises(DataError, match=r'talks\.jsonl, line 1: this JSON object has no "text"'):
            tokens.find_tokens(config(root, "blend", "blend.yaml"))


def test_ids_of_another_tokenizer_are_warned_of_by_rank_0(root, caplog, monkeypatch):
    open_corpus(config(root))
    ours = tokens.caches(config(root))[0].find()
    other = str(root / "other")
    convert(open_texts("jsonl", str(root / "texts.jsonl")), Recipe(find_tokenizer("bytes")), other)

    def warned(path, source="indexed", **settings):
        caplog.clear()
        tokens._warn_of_tokenizer.cache_clear()
        for _ in range(2):  # to check the documents, and to train
            open_corpus(config(root, source, path, **settings))
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    assert warned(ours) == [] == warned(other, data__tokenizer="bytes") == warned(other, data__tokenizer="gone")
    (said,) = warned(other)
    assert f"{other}.bin was made with the tokenizer bytes" in said and f"data.tokenizer has another, {root}:" in said
    blend = root / "blend.yaml"
    lines = [f"- {{source: indexed, path: {each}, epochs: 1}}\n" for each in (ours, other)]
    blend.write_text("".join(lines))
    (said,) = warned(blend.name, "blend", data__tokenizer="bytes")
    assert f"{other}.bin was made with the tokenizer bytes" in said and f"{ours}.bin has another, {root}/" in said
    blend.write_text(lines[1] + "- {source: jsonl, path: texts.jsonl, epochs: 1}\n")
    assert len(warned(blend.name, "blend")) == 1
    monkeypatch.setenv("RANK", "1")
    assert warned(blend.name, "blend") == []


def test_conversations_weigh_the_same_in_the_loss_of_documents(root):
    asked = config(root, path="talks.jsonl", data__conversations=True, train__loss="document")
    corpus = open_corpus(asked)
    (step,) = dealt(corpus.train, open_sampler(asked, corpus.train, 2), 1, "document")
    assert [each.shape for each in step.weights] == [(len(step.micro_batches[0]),)]

    class Part(list):
        def learned(self, part):
            return [token > 0 for token in self[part]]

    (weights,) = document_weights([[Part([1, 1, 1, 1, 1]), Part([1, 0, 1, 0]), Part([1, 0])]])
    assert weights[:2].tolist() == [5 / 2 / 4, 5 / 2 / 1] and 4 * weights[0] + weights[1] == 5


BAD = ({"messages": [{"role": "nobody", "content": "x"}]}, {"text": "no messages"}, {"messages": TALK[:1]})


def test_bad_conversations_end_the_run_or_are_left_out_and_named(root, caplog):
    good = json.dumps({"messages": TALK})
    lines = [good, json.dumps(BAD[0]), "{", *map(json.dumps, BAD[1:]), *[json.dumps(BAD[0])] * 4, good, good]
    (root / "mixed.jsonl").write_text("\n".join(lines) + "\n")
    asked = {"path": "mixed.jsonl", "data__conversations": True, "data__validation_fraction": 0}
    skipping = config(root, data__bad="skip", **asked)
    assert tokens.find_tokens(skipping) is None
    with caplog.at_level(logging.INFO, logger="distca"):
        corpora = [open_corpus(skipping) for _ in range(2)]  # that makes the tokens, and that finds them
    for corpus in corpora:
        assert len(corpus.train) == 3
        bad, empty = map(str, corpus.left_out)
        assert bad.startswith("7 documents that cannot be read or tokenized, the first of them: ")
        assert re.findall(r"mixed\.jsonl, line (\d)", bad) == ["2", "3", "4", "6", "7"]
        assert "line 2 cannot be tokenized (message 1 has the role 'nobody'" in bad and 'no "messages"' in bad
        assert empty == "1 document without a token to learn"
    assert f"left out {bad}" in caplog.text and f"left out {empty}" in caplog.text
    with pytest.raises(DataError, match=r"mixed\.jsonl, line 2 .*'nobody'.*, or set `bad` to skip to leave such"):
        open_corpus(config(root, **asked))
    (root / "mixed.jsonl").write_text("\n".join(lines[1:-2]) + "\n")
    with pytest.raises(DataError, match=r"made no token to learn of 8 documents; nothing was written\. 7 documents"):
        open_corpus(skipping)


def test_bad_lines_of_bytes_are_left_out_too(root):
    (root / "mixed.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n{"text": "three"}\n')
    asked = {"path": "mixed.jsonl", "data__tokenizer": "bytes", "data__validation_fraction": 0}
    with pytest.raises(DataError, match=r"mixed\.jsonl, line 2"):
        open_corpus(config(root, **asked))
    corpus = open_corpus(config(root, data__bad="skip", **asked))
    assert corpus.train.lengths.tolist() == [3, 5] and "mixed.jsonl, line 2: this JSON" in str(corpus.left_out[0])


def test_long_conversations_are_left_out_by_default(root):
    long = [TALK[0] | {"content": "x" * 100}, TALK[1]]
    (root / "mixed.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in (TALK, long, TALK)))
    asked = {"path": "mixed.jsonl", "data__conversations": True, "data__validation_fraction": 0}
    corpus = open_corpus(config(root, **asked))
    assert len(corpus.train) == 2 and str(corpus.left_out[0]) == "1 document of more than 96 tokens"
    cut = open_corpus(config(root, data__longer="split", **asked))
    assert len(cut.train) == 3, "the first piece has nothing to learn"
    with pytest.raises(DataError, match="more than `context_length` 96"):
        open_corpus(config(root, data__longer="error", **asked))


def test_ranks_wait_for_rank_0_and_hear_its_error(root, monkeypatch):
    """Two ranks as threads, with words of rank 0 that pass in turn."""
    import torch.distributed as dist

    heard, words = [], threading.Barrier(2)
    said = [None]

    def broadcast(values):
        if threading.current_thread().name == "rank 0":
            said[0] = values[0]
        words.wait(60)
        values[0] = said[0]
        heard.append(values[0])
        words.wait(60)

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(tokens, "_BEAT_S", 0.05)
    release, results = threading.Event(), {}

    def make(_):
        release.wait(60)
        raise DataError("no")

    def rank(number):
        try:
            tokens.make_tokens_together(config(root), SimpleNamespace(rank=number))
        except DataError as error:
            results[number] = str(error)

    monkeypatch.setattr(tokens, "make_tokens", make)
    threads = [threading.Thread(target=rank, args=(number,), name=f"rank {number}") for number in (0, 1)]
    for thread in threads:
        thread.start()
    while len(heard) < 6:
        threading.Event().wait(0.01)
    release.set()
    for thread in threads:
        thread.join(60)
    assert results == {0: "no", 1: "no"}
    assert heard[:6] == [None] * 6, "a word now and then while it works"


def test_a_run_without_any_setting_has_documents():
    asked = parse_run_config([])
    assert open_corpus(asked).train.lengths.max() == asked.data.context_length


def test_tokens_that_a_node_sees_late_are_waited_for(root, monkeypatch):
    asked = config(root)
    prefixes = tokens.make_tokens(asked)
    hidden = {file: file.with_name(f".{file.name}") for file in Path(prefixes[0]).parent.iterdir()}
    for file, aside in hidden.items():
        file.rename(aside)
    listed, listdir = [], os.listdir

    def appears(folder):
        listed.append(Path(folder))
        if listed.count(Path(prefixes[0]).parent) == 3:
            for file, aside in hidden.items():
                aside.rename(file)
        return listdir(folder)

    monkeypatch.setattr(tokens.os, "listdir", appears)
    monkeypatch.setattr(tokens, "_LOOK_AGAIN_S", 0.01)
    assert len(tokens.open_tokens(asked, prefixes).lengths) == 20
    assert asked.resolved_cache in map(str, listed), "the folder above is stale as well"
    Path(f"{prefixes[0]}.idx").unlink()
    monkeypatch.setattr(tokens, "_SEEN_S", 0.05)
    with pytest.raises(DataError, match=r"are not there on this node, 0 s later; set `cache` to a folder"):
        tokens.open_tokens(asked, prefixes)
