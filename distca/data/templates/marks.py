"""The message that each character of a rendered conversation belongs to: texts are rendered again, as other characters.

A conversation is rendered twice: as it is, and with every character of its texts replaced by another. Each replacement
stands for one character of one text and appears nowhere else. Where both renderings agree, the second shows of every
character whether it is the template's, or of which text of which message. Spaces and quotes stay as they are, since
templates trim texts and write them as JSON.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_LETTERS = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x20000, 0x2A6D0), (0x2A700, 0x2EBE0))
"""Ranges of letters that can be printed and have neither case nor a second form: templates treat them as letters."""
_OTHERS = ((0x40000, 0x4FFFD), (0x50000, 0x5FFFD), (0x60000, 0x6FFFD), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
"""Ranges of characters without a meaning, which are used when all letters are."""
_ESCAPED = frozenset("\"'\\")
"""Characters that JSON and Python's literals write otherwise."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message has what the assistant thinks. As in transformers, all hold the same."""
TEMPLATE, TOOLS = -1, -2
"""In place of a message's number, for what the template writes and for the descriptions of tools."""


@dataclass
class Source:
    """A text of a conversation.

    Attributes:
        message: number of the message that it is of, from 0, or TOOLS.
        name: of the field; empty where the template need not show the text.
        marks: characters that stand for those of the text.
    """

    message: int
    name: str
    marks: str = ""


class Marks:
    """The characters that stand for those of texts.

    Attributes:
        sources: texts by number; number 0 is the template.
        source_by_code: [code points] int32, number of the text that a character is a mark of.
    """

    def __init__(self, used: set[str], control: re.Pattern[str], kept: Sequence[str] = ()) -> None:
        """Begin without texts.

        Args:
            used: characters that no mark may be.
            control: matches control tokens of the tokenizer.
            kept: texts that stay as they are, since the template looks for them.
        """
        self.sources = [Source(TEMPLATE, "")]
        self._control, self._free = control, _free_characters(used)
        longest_first = "|".join(map(re.escape, sorted(kept, key=len, reverse=True)))
        self._kept = re.compile(f"({longest_first})") if kept else None
        self.source_by_code = np.zeros(sys.maxunicode + 1, np.int32)
        self._original: dict[int, str] = {}

    def message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message, which has the given number from 0, with marks in place of its texts."""
        thoughts: list[tuple[Any, Any]] = []
        marked = {}
        for name, value in message.items():
            if name == "content":
                marked[name] = self._content(value, number)
            elif name in REASONING:
                known = [made for given, made in thoughts if given == value]
                marked[name] = known[0] if known else self._all(value, number, name)
                thoughts.append((value, marked[name]))
            elif name == "tool_calls":
                marked[name] = [self._call(call, number) for call in value]
            else:
                marked[name] = value if name == "role" else self._controls(value, number)
        return marked

    def tools(self, tools: list[Any] | None) -> list[Any] | None:
        """Returns tools with marks for the control tokens that stand in them."""
        made: list[Any] | None = self._controls(tools, TOOLS)
        return made

    def unmarked(self, text: str) -> str:
        """Returns a rendering with the characters that the marks stand for."""
        return text.translate(self._original)

    def _content(self, content: Any, number: int) -> Any:
        if not isinstance(content, list):
            return self._all(content, number, "content")
        texts = [text for part in content if (text := text_of(part)) is not None]
        marked = iter(self._all(texts, number, "content"))
        rest = [part if isinstance(part, str) else self._controls(part, number) for part in content]
        return [part if text_of(part) is None else _with_text(part, next(marked)) for part in rest]

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        called: dict[str, Any] = self._controls(call, number)
        function = call["function"]
        is_in_id = function["name"] in str(call.get("id"))  # which some templates write alone
        marked = {"name": self._all(function["name"], number, "" if is_in_id else "tool_calls")}
        if "arguments" in function:
            marked["arguments"] = self._all(function["arguments"], number, "tool_calls")
        return called | {"function": called["function"] | marked}

    def _all(self, value: Any, number: int, name: str) -> Any:
        """Returns a value with a mark for every character of its texts and keys, except spaces and what is kept."""
        characters = {each for text in texts_of(value) for each in text}
        source = Source(number, name)
        table = self._table({each for each in characters if _can_be_marked(each)}, source)

        def marked(text: str) -> str:
            parts = self._kept.split(text) if self._kept else [text]  # texts and kept ones in turn
            return "".join(part if place % 2 else part.translate(table) for place, part in enumerate(parts))

        made = _mapped(value, marked)
        source.marks = self._in(made)
        return made

    def _controls(self, value: Any, number: int) -> Any:
        """Returns a value with marks for the control tokens in its texts and keys alone."""
        found = {each for text in texts_of(value) for match in self._control.finditer(text) for each in match[0]}
        if not found:
            return value
        source = Source(number, "")
        table = self._table(found, source)
        made = _mapped(value, lambda text: self._control.sub(lambda match: match[0].translate(table), text))
        source.marks = self._in(made)
        return made

    def _in(self, value: Any) -> str:
        codes = code_points("".join(texts_of(value)))
        return codes[self.source_by_code[codes] > 0].tobytes().decode("utf-32-le", "surrogatepass")

    def _table(self, characters: set[str], source: Source) -> dict[int, str]:
        """Returns a mark for each character, in the order of the characters: what is sorted stays so."""
        table = {}
        for character in sorted(characters):
            mark = next(self._free, None)
            if mark is None:
                raise ValueError("it has too many texts to tell them apart; split it")
            table[ord(character)] = mark
            self._original[ord(mark)] = character
            self.source_by_code[ord(mark)] = len(self.sources)
        self.sources.append(source)
        return table


def code_points(text: str) -> np.ndarray:
    """[characters] uint32: the code point of each character of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def text_of(part: Any) -> str | None:
    """Returns the text of a part of a content; None where it is an image or the like."""
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else None


def _with_text(part: Any, text: str) -> Any:
    return part | {"text": text} if isinstance(part, dict) else text


def _can_be_marked(character: str) -> bool:
    return not (character.isspace() or character in _ESCAPED or ord(character) < 32)


def _free_characters(used: set[str]) -> Iterator[str]:
    for first, last in (*_LETTERS, *_OTHERS):
        for each in map(chr, range(first, last + 1)):
            if each not in used:
                yield each


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from texts_of(name)
            yield from texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a value of JSON with all its texts and keys changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(name, change): _mapped(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, change) for each in value]
    return value
