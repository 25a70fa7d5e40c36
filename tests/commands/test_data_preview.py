"""Tests distca/commands/data_preview.py, and the tokenizers of the other commands about data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distca.commands.data import convert, describe
from distca.commands.data_preview import preview
from distca.commands.plan import plan
from distca.errors import DistcaError
from tests.models.tokenizer import write_tokenizer

pytest.importorskip("tokenizers")

TALK = [
    {"role": "user", "content": "hellö <|end|> \x1b[31m"},
    {"role": "assistant", "content": "one", "weight": 0},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "twö"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    talks = [TALK, TALK[:1], *[[{"role": "nobody", "content": "x"}]] * 7, TALK]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in talks))
    return tmp_path


def shown_by(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_what_is_learned_is_marked_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A control token that stands in a message is text, and so not marked as one."""
    preview(path=str(folder / "talks.jsonl"), tokenizer=str(folder))
    shown = shown_by(capsys)
    assert shown.startswith(
        "⟦learned⟧  ‹control token›\n‹<|begin|>›user\nhellö <|end|> \\x1b[31m‹<|end|>›assistant\none‹<|end|>›user\nmore"
        "‹<|end|>›assistant\n⟦twö‹<|end|>›⟧\n\n"
    )
    rows = [[each.strip() for each in line.split("│")[1:3]] for line in shown.splitlines() if line.startswith("│")]
    tokens = 2 * len(f"{TALK[0]['content']}user\nassistant\noneuser\nmoreassistant\ntwö".encode()) + 2 * 5
    assert rows == [
        ["conversations that are learned", "2"],
        ["with nothing to learn, left out", "1"],
        ["refused", "7"],
        ["tokens", str(tokens)],
        ["tokens that are learned", f"10 ({10 / tokens:.1%})"],
        ["tokens of the longest", str(tokens // 2)],
    ]
    assert shown.count("\nrefused: ") == 6 and "line 3 cannot be tokenized (message 1 has the role 'nobody'" in shown
    assert shown.endswith("refused: 2 more\n")


def test_colours_take_the_place_of_marks(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    preview(path=str(folder / "talks.jsonl"), tokenizer=str(folder), sample=1)
    shown = shown_by(capsys)
    assert "\x1b[32mtwö\x1b[0m" in shown and "⟦" not in shown and "\x1b[31m" not in shown


def test_one_that_is_refused_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preview(path=str(folder / "talks.jsonl"), tokenizer=str(folder), conversation=4, sample=1)
    shown = shown_by(capsys)
    assert shown.startswith("Conversation 4 is refused: ") and "line 4 cannot be tokenized (message 1" in shown
    assert "The first 1 conversation of" in shown
    with pytest.raises(DistcaError, match=r"--conversation is 11, but .* holds 10 conversations"):
        preview(path=str(folder / "talks.jsonl"), tokenizer=str(folder), conversation=11)


def test_lengths_as_the_tokenizer_makes_them(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="distca")
    path = str(folder / "talks.jsonl")
    with pytest.raises(DistcaError, match=r"line 3 .*, or set `bad` to skip"):
        describe(path, source="jsonl", tokenizer=str(folder), conversations=True)
    describe(path, source="jsonl", tokenizer=str(folder), conversations=True, bad="skip")
    rows = dict(
        [each.strip() for each in line.split("│")[1:3]] for line in shown_by(capsys).splitlines() if line[0] == "│"
    )
    length = int(rows["longest document"])
    assert rows["all 2 documents"] == str(2 * length) and rows["learned tokens"] == f"10 ({5 / length:.1%})"
    assert "left out 7 documents that cannot be read or tokenized" in caplog.text
    (folder / "talks.yaml").write_text("- {source: jsonl, path: talks.jsonl, epochs: 1}\n")
    for data in (f"jsonl:{path}", f"blend:{folder / 'talks.yaml'}"):
        plan(data, ranks=2, tokens_per_rank=length, bad="skip", tokenizer=str(folder), conversations=True)
        assert f"2 documents, {2 * length} tokens on 2 ranks" in shown_by(capsys)
    with pytest.raises(DistcaError, match="All of 2 documents have more than `context_length`"):
        plan(data, ranks=1, tokens_per_rank=length - 1, bad="skip", tokenizer=str(folder), conversations=True)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ("pretrain", "--tokenizer is about training data, but 'pretrain' is none; leave it out."),
        ("indexed:somewhere", "`tokenizer` is folder, but KIND is indexed, whose documents are token ids already"),
    ],
)
def test_a_tokenizer_that_would_be_passed_over_is_refused(lengths: str, said: str) -> None:
    with pytest.raises(DistcaError) as refused:
        plan(lengths, tokenizer="folder")
    assert str(refused.value).startswith(said)


def test_convert_leaves_out_what_is_bad_where_that_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(folder / "out")
    convert(
        str(folder / "talks.jsonl"),
        output=output,
        source="jsonl",
        tokenizer=str(folder),
        conversations=True,
        bad="skip",
    )
    shown = shown_by(capsys)
    assert "2 documents" in shown and "1 document without a token to learn left out" in shown
    assert "left out 7 documents that cannot be read or tokenized, the first of them: " in shown
