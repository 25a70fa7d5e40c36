"""Conversations through a tokenizer's chat template, and which of their tokens the assistant says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distca.data.conversations import tools_of
from distca.data.recipe import Encoded, Recipe
from distca.data.rows import columns_beside, turns_of
from distca.data.templates.marks import REASONING
from distca.data.templates.process import TODAY
from distca.data.templates.template import ChatTemplate
from distca.data.templates.tokens import ChatTokenizer
from distca.data.templates.turns import TurnFinder
from distca.data.texts import Row
from distca.data.tokenizer import load_json, read_beside, read_settings, read_text, token_text
from distca.errors import DataError

_CLOCK = "strftime_now"
"""The name by which templates ask for today's date."""
_READING = 3
"""Counts the changes to how conversations become ids and masks. Tokens that were cached before such a change are made
again."""


@dataclass(frozen=True)
class ChatRecipe(Recipe):
    """How conversations become ids.

    Attributes:
        template: the chat template, in Jinja; empty where there is one for conversations with tools only.
        tool_use: the one for conversations with tools; empty where all have the same.
        tokens: special tokens that a template may name, such as bos_token.
    """

    field: str = "messages"
    template: str = ""
    tool_use: str = ""
    tokens: tuple[tuple[str, str], ...] = ()

    @property
    def beside(self) -> tuple[str, ...]:
        return columns_beside(self.field)

    def open(self) -> ChatEncoder:
        templates = (ChatTemplate(source, self.tokens) for source in (self.template, self.tool_use))
        return ChatEncoder(load_json(Path(self.tokenizer.name)), *templates)

    def identity(self) -> dict[str, Any]:
        said: dict[str, Any] = {"reading": _READING, "field": self.field, "beside": list(self.beside)}
        said |= {"chat_template": self.template, "special_tokens": dict(self.tokens)}
        said |= {"tool_use": self.tool_use} if self.tool_use else {}
        if _CLOCK in self.template + self.tool_use:
            said["date"] = TODAY.isoformat()
        return {"tokenizer_digest": self.tokenizer.digest()} | said


def chat_recipe(recipe: Recipe, begin_token: str | None = None, end_token: str | None = None) -> ChatRecipe:
    """The same tokenizer with the chat templates beside it. Of several the one named tool_use is for conversations with
    tools, and the one named default for all others, as in transformers.

    Args:
        recipe: for texts.
        begin_token: that was asked for.
        end_token: that was asked for.

    Raises:
        DataError: there is no template, or a token is asked for, which only texts have.
    """
    for name, token in (("begin_token", begin_token), ("end_token", end_token)):
        if token:
            raise DataError(
                f"`{name}` is {token!r}, but how conversations begin and end is the template's; leave it out."
            )
    folder, field = Path(recipe.tokenizer.name).parent, recipe.field
    said = read_settings(folder)
    templates = _template_files(folder) or _by_name(read_beside(folder / "chat_template.json")) or _by_name(said)
    template, tool_use = (templates.get(name, "") for name in ("default", "tool_use"))
    if recipe.tokenizer.name == "bytes" or not (template or tool_use):
        raise DataError(
            f"Conversations need a chat template, and the tokenizer {recipe.tokenizer.name} has none beside it "
            "(chat_template.jinja, or chat_template in tokenizer_config.json); set `tokenizer` to a model's folder "
            "that has one."
        )
    special = {name: each for name, each in said.items() if name.endswith("_token")}
    for held in map(said.get, ("extra_special_tokens", "model_specific_special_tokens")):
        special |= held if isinstance(held, dict) else {}
    tokens = tuple(sorted((name, token) for name, each in special.items() if (token := token_text(each))))
    return ChatRecipe(recipe.tokenizer, field, template, tool_use, tokens)


def _template_files(folder: Path) -> dict[str, str]:
    """Templates in files of their own, by name."""
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if os.path.lexists(folder / "chat_template.jinja"):
        files["default"] = folder / "chat_template.jinja"
    return {name: read_text(file) for name, file in files.items()}


def _by_name(said: dict[str, Any]) -> dict[str, str]:
    """Returns the templates of a JSON object by name: it holds one, or several with names."""
    held = said.get("chat_template")
    if isinstance(held, list):
        held = {str(each.get("name")): each.get("template") for each in held if isinstance(each, dict)}
    named = held if isinstance(held, dict) else {"default": held}
    return {name: each for name, each in named.items() if isinstance(each, str)}


class ChatEncoder:
    """Conversations to ids and masks. A control token that stands in a message is encoded as text.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        template: for conversations; without source where only those with tools have one.
        tool_use: for those with tools; without source where they have the same.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate, tool_use: ChatTemplate) -> None:
        self._tokenizer, self._template, self._tool_use = ChatTokenizer(tokenizer), template, tool_use
        self.vocabulary = self._tokenizer.vocabulary

    def encode(self, values: Sequence[Any]) -> list[Encoded]:
        """Ids of every conversation, and which of them the assistant says; ValueError if one cannot be encoded."""
        return [self._encode(value) for value in values]

    def _encode(self, value: Any) -> Encoded:
        row = value if isinstance(value, Row) else Row(value, {})
        tools = tools_of(row.others.get("tools"))
        messages, learned = turns_of(row, self._template_for(tools).source)
        return self.conversation(messages, tools, learned)

    def conversation(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, learned: Sequence[bool] | None = None
    ) -> Encoded:
        """Returns a conversation's ids, as transformers makes them, and which of them the assistant says.

        Args:
            messages: as ``messages_of`` gives them.
            tools: that the assistant may call.
            learned: of each of the assistant's messages, in order, whether it is learned; None for all.

        Raises:
            ValueError: it cannot be encoded, or what the assistant says cannot be told from the rest.
            DataError: the template cannot be read.
            VersionError: a package is missing.
        """
        template = self._template_for(tools)
        if tools and "tools" not in template.source:
            raise ValueError("it has tools, but the chat template has no place for them; take them out")
        found = TurnFinder(template, self._tokenizer.control, [_completed(message) for message in messages], tools)
        speakers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = {number for number, each in zip(speakers, learned or [True] * len(speakers), strict=True) if each}
        spans = [(turn.start, turn.stop) for turn in found.turns() if turn.message in wanted]
        return self._tokenizer.encode(found.text, found.whole, spans, wanted)

    def _template_for(self, tools: list[Any] | None) -> ChatTemplate:
        template = self._tool_use if tools and self._tool_use.source else self._template
        if not template.source:
            raise ValueError("it has no tools, and the tokenizer has a chat template only for conversations with tools")
        return template


def _completed(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message as transformers gives it to templates, without an empty list of calls.

    What the assistant thinks has all of its names, since a template knows one of them.
    """
    message = {name: value for name, value in message.items() if not (name == "tool_calls" and not value)}
    thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if thought is None:
        return message
    return message | {"reasoning_content": thought, "thinking": message.get("thinking", thought)}
