"""What closes a turn."""

from __future__ import annotations

import re

import pytest

from distca.data.templates.closing import alike, closing

CONTROL = re.compile(r"<\|\w+\|>")


@pytest.mark.parametrize(
    ("last", "followed", "at_last", "before_another"),
    [
        ("<|end|>\n", "<|end|>\n<|begin|>user", "<|end|>", "<|end|>"),
        ("<|end|>\n<|eos|>", "<|end|>\n<|user|>", "<|end|>", "<|end|>"),  # Phi-3.5
        ("<|return|>", "<|end|><|start|>user", "<|return|>", ""),  # gpt-oss
        ("", "<|user|>\n", "", "<|user|>"),  # GLM
        ('"}<|ca|><|cb|><|end|>', '"}<|ca|><|cb|><|end|><|tool|>', '"}<|ca|><|cb|><|end|>', '"}<|ca|><|cb|><|end|>'),
        ("<|end|><|begin|>assistant", "<|end|><|begin|>user", "<|end|>", "<|end|>"),  # a prompt that is always there
        ("\n\n", "\n\n### Question", "\n\n", "\n\n"),  # no control tokens
        ("<|end|>", None, "<|end|>", None),
        (None, "<|end|>\n<|user|>", None, "<|end|>"),
        (None, "\n", None, ""),
        ("\n", None, "\n", None),
    ],
)
def test_what_closes_a_turn(last: str | None, followed: str | None, at_last: str, before_another: str) -> None:
    for is_last, text, expected in ((True, last, at_last), (False, followed, before_another)):
        if text is not None:
            length, closed = closing(last, followed, is_last, 0, CONTROL)
            assert text[:length] == expected and closed == bool(CONTROL.search(expected))


def test_tokens_are_not_cut() -> None:
    assert alike("a<|end|>", "a<|eos|>", CONTROL) == 1
    assert alike("a<|end|>b", "a<|end|>", CONTROL) == len("a<|end|>")
    assert alike("ab", "ac", CONTROL) == 1
