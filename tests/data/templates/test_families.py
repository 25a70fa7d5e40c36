"""Templates of the families that people fine-tune: what is learned, marked by hand, and ids as in transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from distca.data.chat import ChatEncoder
from tests.data.templates.chats import byte_tokenizer, encoder, runs
from tests.data.templates.families.table import CONVERSATIONS, FAMILIES, TOOLS, template_of

LEARNED = [
    (name, each) for name in FAMILIES for each in CONVERSATIONS if isinstance(FAMILIES[name].learned[each], list)
]


@cache
def parts_of(name: str) -> tuple[Any, ChatEncoder]:
    """A family's tokenizer, and its encoder."""
    family = FAMILIES[name]
    control = [family.begin, family.end, *family.control.split()]
    tokenizer = byte_tokenizer(control, family.words.split())
    return tokenizer, encoder(tokenizer, template_of(name), bos_token=family.begin, eos_token=family.end)


def tools_of(name: str, conversation: str) -> list[dict[str, Any]] | None:
    return TOOLS if conversation == "tools" and FAMILIES[name].tools else None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_learned_is_what_was_marked_by_hand(name: str, conversation: str) -> None:
    tokenizer, made = parts_of(name)
    expected = FAMILIES[name].learned[conversation]
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"^{expected}"):
            made.conversation(CONVERSATIONS[conversation], tools_of(name, conversation))
    else:
        ids, mask = made.conversation(CONVERSATIONS[conversation], tools_of(name, conversation))
        assert runs(tokenizer, ids, mask) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer, made = parts_of(name)
    family = FAMILIES[name]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.begin, eos_token=family.end
    )
    template = template_of(name).replace("strftime_now('%d %B %Y')", "'26 July 2024'")
    template = template.replace("strftime_now('%Y-%m-%d')", "'2024-07-26'")
    for conversation in (each for known, each in LEARNED if known == name):
        messages, tools = CONVERSATIONS[conversation], tools_of(name, conversation)
        expected = theirs.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=True)
        assert made.conversation(messages, tools)[0].tolist() == expected["input_ids"], conversation
