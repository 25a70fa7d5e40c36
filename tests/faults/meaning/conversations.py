"""Changed conversations, in which every text has a word that no other text has."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TOKEN = "qzjtokenjzq"
"""Stands in a text where a control token does, for a judge that would make one of it."""
_BESIDE = (
    "",
    "",
    "",
    " ",
    "\n",
    "\n\n",
    "…",
    ". ",
    "assistant\n",
    "<think>",
    "</think>",
    "user: ",
    '"',
    "'",
    "{}",
    "\\n",
)
_ROLES = ("user", "assistant", "system", "tool", "developer")


@dataclass
class Conversation:
    """A conversation.

    Attributes:
        messages: its messages.
        tools: that the assistant may call.
        words: by word, the number of its message; -1 for tools.
        optional: words of what the assistant thinks, and of names, which templates may leave out.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    words: dict[str, int] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)


def changed_conversation(
    randomly: random.Random, control: Sequence[str], has_tools: bool, tries_tokens: bool
) -> Conversation:
    """A conversation of one to seven messages.

    Args:
        randomly: draws it.
        control: control tokens, of which texts may hold some.
        has_tools: whether the assistant may call tools.
        tries_tokens: whether texts hold control tokens, as TOKEN and its number with a dot.
    """
    made = Conversation([])
    roles = ["user", "assistant"] * randomly.randint(1, 3)
    if randomly.random() < 0.3:
        roles.insert(0, "system")
    if randomly.random() < 0.15:
        roles.pop()
    if randomly.random() < 0.1:
        roles.insert(0, "assistant")
    if randomly.random() < 0.12:
        roles.insert(randomly.randrange(len(roles) + 1), randomly.choice(_ROLES))

    def word(number: int) -> str:
        drawn = "q" + "".join(randomly.choice("bcdfghjklmnprstvwxyz") for _ in range(11))
        made.words[drawn] = number
        return drawn

    def text(number: int) -> str:
        drawn = randomly.random()
        if drawn < 0.06:
            return randomly.choice(("", "", " ", "\n"))
        if drawn < 0.1:
            return "The same in all."
        parts = [randomly.choice(_BESIDE), word(number), randomly.choice(_BESIDE)]
        if randomly.random() < 0.15:
            parts.append(word(number))
        if tries_tokens and randomly.random() < 0.4:
            at = randomly.randrange(len(control))
            parts.insert(randomly.randrange(len(parts) + 1), f"{TOKEN}{at:02}.")
        return "".join(parts)

    for role in roles:
        number = len(made.messages)
        message: dict[str, Any] = {"role": role, "content": text(number)}
        if role == "assistant" and randomly.random() < 0.15:
            before = set(made.words)
            message["reasoning_content"] = text(number)
            made.optional |= set(made.words) - before
        if randomly.random() < 0.06:
            message["content"] = [{"type": "text", "text": message["content"]}, {"type": "text", "text": text(number)}][
                : randomly.randint(1, 2)
            ]
        if randomly.random() < 0.05:
            message["name"] = word(number)
            made.optional.add(message["name"])
        made.messages.append(message)
        if has_tools and role == "assistant" and randomly.random() < 0.4:
            message["content"] = randomly.choice(("", message["content"]))
            name, key = f"call_{randomly.randrange(3)}", f"key{TOKEN}00." if tries_tokens else "key"
            called = {"name": name, "arguments": {key: text(number), "days": randomly.randrange(9)}}
            message["tool_calls"] = [{"id": f"{name}:0", "type": "function", "function": called}]
            made.messages.append({"role": "tool", "content": text(number + 1), "tool_call_id": f"{name}:0"})
            made.messages.append({"role": "assistant", "content": text(number + 2)})
    if has_tools and randomly.random() < 0.8:
        parameters = {"type": "object", "properties": {"key": {"type": "string", "description": word(-1)}}}
        described = {"name": "call_0", "description": word(-1), "parameters": parameters}
        made.tools = [{"type": "function", "function": described}]
    held = json.dumps([made.messages, made.tools])
    made.words = {each: number for each, number in made.words.items() if each in held}  # some contents were left out
    return made


def with_tokens(value: Any, control: Sequence[str]) -> Any:
    """The same value of JSON with real control tokens in place of what stands for them."""
    if isinstance(value, str):
        for at, token in enumerate(control):
            value = value.replace(f"{TOKEN}{at:02}.", token)
        return value
    if isinstance(value, dict):
        return {with_tokens(name, control): with_tokens(each, control) for name, each in value.items()}
    return [with_tokens(each, control) for each in value] if isinstance(value, list) else value
