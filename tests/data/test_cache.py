from __future__ import annotations

import json
import os

import pytest

from distca.data import open_source
from distca.data.cache import CachedTokens
from distca.data.recipe import Recipe
from distca.data.texts import open_texts
from distca.data.tokenizer import TokenizerFiles, find_tokenizer
from distca.errors import DataError

BYTES = Recipe(TokenizerFiles("bytes"))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "body": "two"}\n' * 3)
    return str(tmp_path / "a.jsonl")


def cached(tmp_path, path, recipe=BYTES, kind="jsonl"):
    return CachedTokens(tmp_path / "cache", open_texts(kind, path), recipe)


def folders(tmp_path):
    return {path.name for path in (tmp_path / "cache").iterdir()} - {"by_files"}


def test_the_first_start_makes_it_and_later_ones_find_it(tmp_path, text):
    assert cached(tmp_path, text).find() is None
    advanced = []
    prefix = cached(tmp_path, text).make(1, advanced.append)
    assert open_source("indexed", prefix).lengths.tolist() == [3, 3, 3] and advanced
    advanced.clear()
    assert cached(tmp_path, text).find() == prefix == cached(tmp_path, text).make(1, advanced.append)
    assert advanced == []


def test_files_are_known_by_their_content(tmp_path, text):
    prefix = cached(tmp_path, text).make(1)
    os.utime(text, (1, 1))
    moved = os.rename(text, tmp_path / "b.jsonl") or str(tmp_path / "b.jsonl")
    assert cached(tmp_path, moved).find() is None
    assert cached(tmp_path, moved).make(1, lambda _: pytest.fail("tokenized again")) == prefix
    assert cached(tmp_path, moved).find() == prefix


def test_other_content_field_or_tokenizer_are_others(tmp_path, text):
    made = [cached(tmp_path, text).make(1), cached(tmp_path, text, Recipe(TokenizerFiles("bytes"), "body")).make(1)]
    with open(text, "a") as file:
        file.write('{"text": "more"}\n')
    assert cached(tmp_path, text).find() is None
    made.append(cached(tmp_path, text).make(1))
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"?": 0, "</s>": 1}}}
    tokenizer["model"]["unk_token"] = "?"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for end in (None, "</s>"):
        made.append(cached(tmp_path, text, Recipe(find_tokenizer(str(tmp_path / "tokenizer.json"), None, end))).make(1))
    assert len(set(made)) == len(folders(tmp_path)) == 5


def test_a_file_read_as_another_kind_has_tokens_of_its_own(tmp_path, text):
    file = str(tmp_path / "a.data")  # a name that both kinds take
    os.rename(text, file)
    lines, whole = (open_source("indexed", cached(tmp_path, file, kind=kind).make(1)) for kind in ("jsonl", "text"))
    assert lines.lengths.tolist() == [3, 3, 3] and whole.lengths.tolist() == [os.path.getsize(file)]


def test_a_look_finds_what_would_fail_at_once(tmp_path, text):
    assert cached(tmp_path, text).look() == 256
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match='line 1: this JSON object has no "body!"'):
        cached(tmp_path, text, Recipe(TokenizerFiles("bytes"), "body!")).look()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, text):
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match=r"tokens\.bin cannot be written \(.+\); set `cache` or make room for it\.$"):
        cached(tmp_path, text).make(1)
