"""Tests distca/commands/data.py through the parser that the command line uses."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from distca.commands import data
from distca.data import open_source
from distca.errors import DataError, DistcaError

jsonargparse = pytest.importorskip("jsonargparse")


def run(*arguments):
    return jsonargparse.auto_cli({"convert": data.convert, "describe": data.describe}, args=list(arguments))


def test_describe_prints_the_figures_of_a_folder(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "b.txt").write_text("x" * 9000)
    run("describe", "--path", str(tmp_path), "--source", "text")
    lines = {line.strip("│ \n") for line in capsys.readouterr().out.splitlines()}
    figures = {line.split("│")[0].strip(): line.split("│")[1].strip() for line in lines if "│" in line}
    assert figures["all 2 documents"] == "9,100"
    assert figures["mean document"] == "4,550.0"
    assert figures["longest document"] == "9,000"
    assert figures["tokens in documents over 8K"] == "98.9%"
    assert figures["tokens in documents over 32K"] == "0.0%"


def test_convert_writes_what_indexed_reads(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n{"text": "you"}\n')
    output = str(tmp_path / "out")
    run("convert", "--path", str(tmp_path / "a.jsonl"), "--source", "jsonl", "--output", output)
    source = open_source("indexed", output)
    assert bytes(source.read(0, 0, 5).tolist()) == b"hello"
    assert "2 documents, 8 tokens, vocabulary 256" in " ".join(capsys.readouterr().out.split())
    command = [
        sys.executable,
        "-m",
        "distca.commands.main",
        "data",
        "describe",
        "--source",
        "indexed",
        "--path",
        output,
    ]
    described = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert described.returncode == 0 and "all 2 documents" in described.stdout
    assert described.stderr == ""


def test_convert_with_a_tokenizer_file(tmp_path, caplog):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "</s>": 1, "hello": 2, "you": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("hello hello you")
    output, file = str(tmp_path / "out"), str(tmp_path / "tokenizer.json")
    with caplog.at_level(logging.INFO, logger="distca"):
        run(
            "convert", "--path", str(tmp_path / "a.txt"), "--output", output, "--tokenizer", file, "--end_token", "</s>"
        )
    assert f"Texts begin with no token and end with '</s>' of the tokenizer {file}." in caplog.text
    source = open_source("indexed", output)
    assert source.vocabulary == 4
    assert source.read(0, 0, 4).tolist() == [2, 2, 3, 1]


def test_convert_looks_at_the_output_before_anything_is_read(tmp_path):
    with pytest.raises(DataError, match="names no file"):
        run("convert", "--path", str(tmp_path / "nowhere"), "--output", "")
    with pytest.raises(DataError, match=r"/proc/x\.bin cannot be written"):
        run("convert", "--path", str(tmp_path / "nowhere"), "--output", "/proc/x")


def test_a_user_mistake_stays_a_sentence(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        run("describe", "--path", str(tmp_path / "nowhere"), "--source", "text")


@pytest.mark.parametrize(
    "words, said",
    [
        (["describe", "--path", ""], "--source text needs --path."),
        (["convert", "--path", "", "--output", "out"], "The document source 'text' needs a path; set `path`."),
        (["describe", "--path", ".", "--field", "body"], "`field` is body, but `source` is text, whose documents are"),
        (
            ["describe", "--path", "pretrain", "--source", "mix", "--field", "body"],
            "`field` is body, but `source` is mix, whose documents are token ids already; leave it out.",
        ),
        (
            ["convert", "--path", ".", "--output", "out", "--conversations", "true"],
            "`conversations` is true, but `source` is text, whose documents are whole files; leave it out.",
        ),
    ],
)
def test_what_is_empty_or_would_be_passed_over_is_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DistcaError) as no:
        run(*words)
    assert str(no.value).startswith(said)
