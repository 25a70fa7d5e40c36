"""Conversations through a tokenizer's chat template, and which of their tokens the assistant says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from distca.data.conversations import tools_of
from distca.data.recipe import Encoded, Recipe
from distca.data.rows import columns_beside, learned_spans, turns_of
from distca.data.texts import Row
from distca.data.tokenizer import load_json, read_beside, read_settings, read_text, token_text
from distca.errors import DataError, VersionError

_OPEN, _SHUT, _APART = "\U0010fffc", "\U0010fffd", "\U0010fffb"
"""Characters that no text has: around what a template marks as generated, and inside control tokens of contents."""
_CLOCK, _TODAY = "strftime_now", date(2024, 7, 26)
"""By the first, templates ask for today's date: they get the second, which LLaMA's take where they cannot ask, so that
tokens do not depend on the day."""


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
        templates = (ChatTemplate(source, dict(self.tokens)) for source in (self.template, self.tool_use))
        return ChatEncoder(load_json(Path(self.tokenizer.name)), *templates)

    def identity(self) -> dict[str, Any]:
        said = {"chat_template": self.template, "special_tokens": dict(self.tokens), "field": self.field}
        said |= {"beside": list(self.beside)} | ({"tool_use": self.tool_use} if self.tool_use else {})
        if _CLOCK in self.template + self.tool_use:
            said["date"] = _TODAY.isoformat()
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
    special = ((name, token_text(each)) for name, each in said.items() if name.endswith("_token"))
    tokens = tuple(sorted((name, token) for name, token in special if token))
    return ChatRecipe(recipe.tokenizer, field, template, tool_use, tokens)


def _template_files(folder: Path) -> dict[str, str]:
    """Templates in files of their own, by name."""
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if os.path.lexists(folder / "chat_template.jinja"):
        files["default"] = folder / "chat_template.jinja"
    return {name: read_text(file) for name, file in files.items()}


def _by_name(said: dict[str, Any]) -> dict[str, str]:
    """What JSON says of templates: one, or several with names."""
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
        added = tokenizer.get_added_tokens_decoder().values()
        self._control = [token.content for token in added if token.special]
        self.vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._tokenizer, self._template, self._tool_use = tokenizer, template, tool_use

    def encode(self, values: Sequence[Any]) -> list[Encoded]:
        """Ids of every conversation, and which of them the assistant says; ValueError if one cannot be encoded."""
        return [self._encode(value) for value in values]

    def _encode(self, value: Any) -> Encoded:
        row = value if isinstance(value, Row) else Row(value, {})
        tools = tools_of(row.others.get("tools"))
        template = self._tool_use if tools and self._tool_use.source else self._template
        if not template.source:
            raise ValueError("it has no tools, and the tokenizer has a chat template only for conversations with tools")
        messages, learned = turns_of(row, template.source)
        apart = [self._apart(message) | {"role": message["role"]} for message in messages]
        text, spans = template.render(apart, self._control, self._apart(tools))
        starts, pieces = [0], text.split(_APART)
        for piece in pieces:
            starts.append(starts[-1] + len(piece) + 1)
        encodings = self._tokenizer.encode_batch(pieces, add_special_tokens=False)
        ids = np.array([number for encoding in encodings for number in encoding.ids], np.int64)
        offsets = [
            (first + low, first + high)
            for first, encoding in zip(starts[:-1], encodings, strict=True)
            for low, high in encoding.offsets
        ]
        place = np.array(offsets, np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), bool)
        for start, stop in learned_spans(spans, learned):
            mask |= (place[:, 0] < stop) & (place[:, 1] > start)
        return ids, mask

    def _apart(self, value: Any) -> Any:
        """The same with no control token in one piece, in any text of it."""
        if isinstance(value, dict):
            return {name: self._apart(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._apart(each) for each in value]
        for token in self._control if isinstance(value, str) else ():
            value = value.replace(token, token[:1] + _APART + token[1:])
        return value


class ChatTemplate:
    """A template of Jinja, as model folders have them, in a sandbox."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        self.source, self._tokens = source, tokens

    @cached_property
    def _template(self) -> Any:
        try:
            import jinja2
            from jinja2.ext import Extension, loopcontrols
            from jinja2.nodes import CallBlock
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise VersionError("Chat templates need the package jinja2: pip install 'distca[data]'.") from None

        class Generation(Extension):
            """{% generation %} ... {% endgeneration %}: what the assistant says."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(self, caller: Any) -> str:
                return f"{_OPEN}{caller()}{_SHUT}"

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, _CLOCK: _TODAY.strftime}
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise DataError(f"The chat template cannot be read: {error}; correct it.") from None

    def render(
        self, messages: list[dict[str, Any]], control: Sequence[str], tools: list[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and the parts of it, as ranges of characters, that the assistant says with what ends
        its turns.

        Args:
            messages: of the conversation.
            control: control tokens of the tokenizer.
            tools: that the assistant may call.

        Raises:
            ValueError: the template refuses the conversation, has no place for its tools, takes what is no text for
                text, or does not show what the assistant says.
        """
        if tools and "tools" not in self.source:
            raise ValueError("it has tools, but the chat template has no place for them; take them out")
        marked = self._render(messages, tools)
        for number, message in enumerate(messages, 1):
            content = message.get("content")
            if isinstance(content, list | dict) and content and str(content) in marked:
                raise ValueError(
                    f"the content of message {number} is a list of parts, which the chat template takes for text; "
                    "write its text alone"
                )
        if _OPEN in marked:
            return _unmarked(marked)
        return marked, self._turns(marked, messages, control, tools)

    def _turns(
        self, whole: str, messages: list[dict[str, Any]], control: Sequence[str], tools: list[Any] | None
    ) -> list[tuple[int, int]]:
        """Where assistant's turns begin and end, seen from what the template makes of the conversation until then.

        A turn begins where the template asks for it, and ends with the last control token that it puts behind the turn
        when it is the last one; templates that leave out parts of earlier turns do not leave out that.
        """
        turns = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], tools, prompt=True) if number else ""
            start = _alike(whole, before)
            until = self._render(messages[: number + 1], tools)
            ends = [match for token in control if token for match in re.finditer(re.escape(token), until)]
            last = max(ends, key=lambda match: match.end(), default=None)
            stop = -1
            if last is not None and last.start() >= start:
                stop = whole.find(last[0], start)
                stop = stop + len(last[0]) if stop >= 0 else -1
            elif whole.startswith(until):
                stop = len(until)
            if stop <= start or start < _alike(before, self._render(messages[:number], tools)):
                raise ValueError(
                    f"the chat template does not show where message {number + 1}, the assistant's, begins and ends; "
                    "put {% generation %} and {% endgeneration %} around it in the template"
                )
            turns.append((start, stop))
        return turns

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False) -> str:
        template = self._template
        try:
            return str(
                template.render(
                    messages=messages, add_generation_prompt=prompt, tools=tools, documents=None, **self._tokens
                )
            )
        except Exception as error:  # whatever a template does with what it is given
            raise ValueError(f"the chat template fails: {error}") from None


def _alike(one: str, other: str) -> int:
    """Characters with which both begin."""
    if one.startswith(other):
        return len(other)
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def _unmarked(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans, start = "", [], 0
    for part in re.split(f"([{_OPEN}{_SHUT}])", marked):
        if part == _OPEN:
            start = len(text)
        elif part == _SHUT:
            spans.append((start, len(text)))
        else:
            text += part
    return text, spans


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _refuse(message: str) -> None:
    raise ValueError(message)
