"""Chat encoders for tests, of a tokenizer in which every byte is a token, and what they learn."""

from __future__ import annotations

from typing import Any

import pytest

from distca.data.chat import ChatEncoder
from distca.data.templates.template import ChatTemplate


def byte_tokenizer(control: list[str], words: list[str] | None = None) -> Any:
    """Returns a ``tokenizers.Tokenizer`` with so many control tokens and other added tokens behind the bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(control)
    made.add_tokens(words or [])
    return made


def encoder(tokenizer: Any, template: str, **tokens: str) -> ChatEncoder:
    """Returns what encodes conversations by a template, which may name the tokens."""
    pytest.importorskip("jinja2")
    return ChatEncoder(tokenizer, ChatTemplate(template, tuple(tokens.items())), ChatTemplate(""))


def runs(tokenizer: Any, ids: Any, mask: Any) -> list[str]:
    """Returns the text of each run of learned tokens."""
    found: list[list[int]] = []
    for place, (number, is_learned) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
        if is_learned and (place == 0 or not mask[place - 1]):
            found.append([])
        if is_learned:
            found[-1].append(number)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in found]
