"""Conversations in several forms become the same messages, and what cannot be one is a sentence."""

from __future__ import annotations

import json

import pytest

from distca.data.conversations import messages_of, tools_of

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}


def test_sharegpt_turns_are_messages() -> None:
    turns = [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Bern"}})},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "It rains.", "reasoning_content": "rain", "text": "It rains."},
    ]
    assert messages_of(turns, "") == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains.", "reasoning_content": "rain"},
    ]


def test_messages_stay_and_arguments_are_objects() -> None:
    called = {"name": "weather", "arguments": '{"city": "Bern"}'}
    messages = [
        {"role": "user", "content": "weather?", "tool_calls": None},  # as tables have it
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": called}]},
        {"role": "judge", "content": "fine", "weight": 2},
    ]
    assert messages_of(messages, "{% if role == 'judge' %}") == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [{"id": "1", **CALL}]},
        {"role": "judge", "content": "fine", "weight": 2},
    ]


@pytest.mark.parametrize("given", [None, "", " ", [], "[]"])
def test_no_tools(given: object) -> None:
    assert tools_of(given) is None


def test_tools_as_a_list_or_as_json() -> None:
    assert tools_of([{"name": "a"}]) == tools_of('[{"name": "a"}]') == [{"name": "a"}]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{"role": "asistant", "content": "x"}], "message 1 has the role 'asistant', which the chat template does not"),
        ([{"from": "bob", "value": "x"}], "message 1 is from 'bob'; known are system, human, user, gpt, assistant"),
        ([{"from": ["bob"], "value": "x"}], r"message 1 is from \['bob'\]; known are system"),
        ([{"from": "human"}], "message 1 has no value"),
        ([{"from": "function_call", "value": "{"}], "message 1 is a function_call, but its value is no JSON"),
        ([{"role": "user"}], "message 1 is not"),
        ([{"role": "assistant", "tool_calls": [{"arguments": {}}]}], "message 1 calls a tool without a name"),
        ([{"role": "assistant", "tool_calls": 7}], "message 1 has tool_calls that are no list"),
        (
            [{"role": "assistant", "content": "", "function_call": {"name": "a", "arguments": "{}"}}],
            "message 1 has a function_call, which the chat template does not name; write it as tool_calls",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "{"}]}],
            "message 1 calls a with arguments that are no JSON",
        ),
    ],
)
def test_mistakes_are_sentences(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        messages_of(value, "")


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("[", "its tools are no JSON"),
        ({"name": "a"}, "its tools are no list"),
        ([{"name": "a"}, '{"name": "b"}'], "number 2 is a str, not an object"),
    ],
)
def test_mistakes_of_tools_are_sentences(tools: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tools_of(tools)
