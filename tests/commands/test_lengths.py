from pathlib import Path

import pytest

from distca.commands.lengths import read_lengths
from distca.errors import PlanError


def test_a_mix_is_drawn_for_all_ranks() -> None:
    assert read_lengths("prolong", tokens=5000, seed=1).sum() == 5000


@pytest.mark.parametrize(
    "content, words",
    [
        ("5\nsix\n", "Line 2 of .* is 'six'"),
        ("5\n0\n", "Line 2 of .* is '0'"),
        ("\n", "no document length"),
        ("5\n99999999999999999999\n", r"Line 2 of .* is '9+'; a line holds one length from 1 to 4294967296\."),
        ("9" * 5000, r"Line 1 of .* is '9{40}\.\.\.'; a line holds one length"),
        ("4294967296\n1\n", "add up to 4,294,967,297 tokens; a micro-batch has at most 4,294,967,296"),
        ("5\n\xfe\n", "is not UTF-8 text"),
    ],
)
def test_bad_files_are_sentences(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(PlanError, match=words):
        read_lengths(str(path), tokens=1, seed=0)
    data = path.rename(tmp_path / "a.jsonl.gz")
    if "a line holds one length" in words:
        with pytest.raises(PlanError, match=rf"{words}.* Training data are given as jsonl:{data}\.$"):
            read_lengths(str(data), tokens=1, seed=0)
    for name in (str(tmp_path / "none"), ",".join(["4096"] * 100)):
        with pytest.raises(PlanError, match="neither a file nor one of the mixes pretrain, prolong"):
            read_lengths(name, tokens=1, seed=0)
