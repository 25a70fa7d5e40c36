"""Rows of data sets as messages: a conversation with what stands beside it, a prompt with its completion, or Alpaca's.

field          what it holds                         read beside it
messages       messages, or turns of ShareGPT        tools, system
prompt         a text or messages                    completion, label, tools, system
instruction    a text                                input, output, history, tools, system

Any other field holds what messages holds.
"""

from __future__ import annotations

from typing import Any

from distca.data.conversations import messages_of
from distca.data.texts import Row

_BESIDE = {"prompt": ("completion", "label"), "instruction": ("input", "output", "history")}
_UNREAD = ("functions", "documents", "chat_template_kwargs")
"""Columns that change what a template makes of a conversation, and that are not given to it."""
_MARKS = ("weight", "train", "training", "loss")
"""Names under which data sets say of a turn whether it is learned."""
_PARTS = "train_detail"
"""The name under which data sets say it of parts of a turn."""
_SYSTEM = ("system", "developer")


def columns_beside(field: str) -> tuple[str, ...]:
    """Names of the columns that are read beside the one that holds the conversation."""
    return ("tools", "system", *_UNREAD, *_BESIDE.get(field, ()))


def turns_of(row: Row, template: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """The messages of a row, and of each of the assistant's, in order, whether it is learned.

    Args:
        row: the value of one of the fields above, with the columns beside it.
        template: which may know other roles than the usual ones.

    Raises:
        ValueError: the row is no conversation, or something in it cannot be followed.
    """
    for name in _UNREAD:
        if row.others.get(name):
            raise ValueError(f"{name!r} stands beside it, which is not given to the chat template; take it out")
    given, asked = _given(row)
    marks = [_mark(turn, number) for number, turn in enumerate(given, 1)]
    bare = [{name: each for name, each in turn.items() if name not in _MARKS} for turn in given]
    messages = messages_of(bare, template)
    for number, (message, mark) in enumerate(zip(messages, marks, strict=True), 1):
        if mark and message["role"] != "assistant":
            raise ValueError(
                f"message {number}, of {message['role']!r}, asks to be learned; only what the assistant says is "
                "learned, so take that mark out"
            )
    said = zip(messages, marks, asked, strict=True)
    learned = [ask and mark is not False for message, mark, ask in said if message["role"] == "assistant"]
    return _with_system(messages, row.others.get("system")), learned


def _given(row: Row) -> tuple[list[Any], list[bool]]:
    """A row's turns as they stand there, and of each whether it is one that the row asks to be learned."""
    value, others = row.value, row.others
    if "completion" in others:
        if others.get("label", True) == 0:  # as a number, too
            raise ValueError("its label is false: the completion is one that should not be said; take it out")
        prompt = _as_turns(value, "user", "prompt")
        completion = _as_turns(others["completion"], "assistant", "completion")
        return [*prompt, *completion], [False] * len(prompt) + [True] * len(completion)
    if "output" in others:
        turns = [*_earlier(others.get("history") or []), ("user", _instruction(value, others.get("input")))]
        turns.append(("assistant", _text(others["output"], "output")))
        return [{"role": role, "content": text} for role, text in turns], [True] * len(turns)
    if isinstance(value, str):
        raise ValueError(
            "it is a text alone; a conversation is a list of messages, each with a role and a content, a prompt with a "
            "completion beside it, or an instruction with an output beside it"
        )
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        messages_of(value, "")  # says what is wrong with it
    return value, [True] * len(value)


def _as_turns(value: Any, role: str, name: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise ValueError(f"its {name} is neither a text nor a list of messages")
    if name == "completion" and not any(turn.get("role") == role for turn in value):
        raise ValueError("its completion has no message of the assistant")
    return value


def _earlier(history: Any) -> list[tuple[str, str]]:
    """Alpaca's earlier turns, pairs of what the user and what the assistant said."""
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError("its history is no list of pairs, of what the user and what the assistant said")
    roles = ("user", "assistant")
    return [(role, _text(text, "history")) for pair in history for role, text in zip(roles, pair, strict=True)]


def _instruction(value: Any, more: Any) -> str:
    said = _text(value, "instruction")
    return f"{said}\n{_text(more, 'input')}" if more else said


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its {name} is no text")
    return value


def _mark(turn: dict[str, Any], number: int) -> bool | None:
    """Whether a turn says that it is learned, or not; None where it says nothing."""
    if turn.get(_PARTS):
        raise ValueError(f"message {number} has {_PARTS!r}; a turn is learned whole or not at all, so take that out")
    said = {name: turn[name] for name in _MARKS if turn.get(name) is not None}
    for name, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"message {number} has {name} {value!r}; a turn is learned (1, true) or not (0, false)")
    if len(set(map(bool, said.values()))) > 1:
        shown = " and ".join(f"{name} {value!r}" for name, value in said.items())
        raise ValueError(f"message {number} has {shown}, which contradict each other")
    return bool(next(iter(said.values()))) if said else None


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """The messages, behind the system message of a column of its own where a row has one."""
    if not system:
        return messages
    text = _text(system, "system")
    if any(message["role"] in _SYSTEM for message in messages):
        raise ValueError("it has a system message, and another in the column 'system' beside it; take one out")
    return [{"role": "system", "content": text}, *messages]
