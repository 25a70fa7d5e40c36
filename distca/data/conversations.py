"""Conversations as people keep them, as the messages and tools that chat templates take.

A message is {"role": ..., "content": ...}, with tool_calls where the assistant calls tools. ShareGPT's turns are
{"from": "human", "value": ...}; tools may be a list or JSON text of one.
"""

from __future__ import annotations

import json
from typing import Any

from distca.data.templates.marks import REASONING

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "tool": "tool",
}
_CALL = "function_call"
_SAID = "a conversation is a list of messages, each with a role and a content, or with from and value"


def messages_of(value: Any, template: str) -> list[dict[str, Any]]:
    """The messages of a conversation.

    Args:
        value: messages, or turns as ShareGPT has them.
        template: which may know other roles than the usual ones.

    Raises:
        ValueError: it is no conversation, or somebody speaks in it whom nobody knows.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(_SAID)
    return [_message(each, number, template) for number, each in enumerate(value, 1)]


def tools_of(value: Any) -> list[Any] | None:
    """The tools of a conversation, each as a JSON schema; None where it has none.

    Raises:
        ValueError: they are no list of objects.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"its tools are no JSON ({error})") from None
    if value is not None and not isinstance(value, list):
        raise ValueError("its tools are no list of JSON schemas")
    for number, tool in enumerate(value or (), 1):
        if not isinstance(tool, dict):  # a template would write it as a text in quotes
            raise ValueError(
                f"its tools are no list of JSON schemas: number {number} is a {type(tool).__name__}, not an object"
            )
    return value or None


def _message(given: Any, number: int, template: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{_SAID}; message {number} is not")
    message = {name: value for name, value in given.items() if value is not None}  # tables fill rows up with nothing
    if "from" in message and "role" not in message:
        message = _of_sharegpt(message, number)
    role, calls = message.get("role"), message.get("tool_calls") or []
    if not isinstance(role, str) or not ("content" in message or calls):
        raise ValueError(f"{_SAID}; message {number} is not")
    if role not in _ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        raise ValueError(
            f"message {number} has the role {role!r}, which the chat template does not name; usual are "
            f"{', '.join(_ROLES)}"
        )
    if not isinstance(calls, list):
        raise ValueError(f"message {number} has tool_calls that are no list")
    if message.get(_CALL) and _CALL not in template:  # which would be left out, and an empty turn be learned
        raise ValueError(
            f"message {number} has a {_CALL}, which the chat template does not name; write it as tool_calls"
        )
    if calls:
        message["tool_calls"] = [_call(call, number) for call in calls]
    return message


def _of_sharegpt(turn: dict[str, Any], number: int) -> dict[str, Any]:
    who, said = turn["from"], turn.get("value")
    if not isinstance(said, str):
        raise ValueError(f"{_SAID}; message {number} has no value")
    if who == _CALL:
        try:
            call = json.loads(said)
        except ValueError as error:
            raise ValueError(f"message {number} is a {_CALL}, but its value is no JSON ({error})") from None
        calls = call if isinstance(call, list) else [call]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if not isinstance(who, str) or who not in _SHAREGPT:
        raise ValueError(f"message {number} is from {who!r}; known are {', '.join([*_SHAREGPT, _CALL])}")
    beside = {name: turn[name] for name in (*REASONING, "tool_calls") if name in turn}
    return {"role": _SHAREGPT[who], "content": said} | beside


def _call(call: Any, number: int) -> dict[str, Any]:
    """A call whose arguments are an object, as templates write them: many data sets have them as JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {number} calls a tool without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(
                f"message {number} calls {function['name']} with arguments that are no JSON ({error})"
            ) from None
    outer = call if "function" in call else {}
    return {"type": "function"} | outer | {"function": function | {"arguments": arguments}}
