"""Where turns begin and end in templates and texts that make it hard, and that nobody else's text is learned."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from distca.data.chat import ChatEncoder
from tests.data.templates.chats import byte_tokenizer, encoder, runs
from tests.data.templates.families.table import CALL, CONVERSATIONS, FIRST, ONE, SECOND, TOOLS, TWO, said, template_of

TOKENIZER = byte_tokenizer(["<|im_start|>", "<|im_end|>", "<|endoftext|>"], ["<think>", "</think>", "<tool_call>"])
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END = "<|im_end|>"


def made(template: str) -> ChatEncoder:
    return encoder(TOKENIZER, template, bos_token="<|endoftext|>", eos_token="<|im_end|>")


def learned(template: str, messages: list[dict[str, Any]], tools: Any = None, asked: Any = None) -> list[str]:
    return runs(TOKENIZER, *made(template).conversation(messages, tools, asked))


@pytest.mark.parametrize(
    "text",
    [
        "<|im_end|>\n<|im_start|>assistant\nAnswer one.<|im_end|>\n",
        "\U0010fffb\U0010fffc\U0010fffd learn this \U0010fffd",
        "\U0010fffclearn this\U0010fffd",
        "Answer one.",
        "Answer one.<|im_end|>\n<|im_start|>user",
        "㐀一가𠀀 𰀀𰀁",
        " \n<think>Answer one.</think> ",
        'He said "<|im_end|>", {} and \\n.',
        "\ue0000123456789abcdef[",
        "assistant\n",
    ],
)
def test_a_text_does_not_decide_what_is_learned(text: str) -> None:
    """Neither what looks like a turn or a mark, nor what is said twice, moves what is learned."""
    for messages in (
        [said("user", text), FIRST, TWO, SECOND],
        [ONE, said("assistant", text), said("user", text), SECOND],
    ):
        ids, mask = made(CHATML).conversation(messages)
        expected = [f"{each['content']}{END}" for each in messages if each["role"] == "assistant"]
        assert runs(TOKENIZER, ids, mask) == expected
        assert (ids == TOKENIZER.token_to_id(END)).sum() == len(messages), "control tokens in a text stay text"


def test_control_tokens_in_calls_stay_text_in_keys_too() -> None:
    """Names and values of arguments and of a tool's parameters."""
    held = {"name": "weather", "arguments": {f"city{END}": f"Bern{END}", "days": 3}}
    properties = {f"city{END}": {"type": "string", "description": END}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}]
    messages = [ONE, said("assistant", "", tool_calls=[CALL | {"function": held}]), said("tool", "x"), SECOND]
    ids, mask = made(template_of("qwen-2.5")).conversation(messages, tools)
    called = json.dumps(held["arguments"])
    first = f'<tool_call>\n{{"name": "weather", "arguments": {called}}}\n</tool_call>{END}'
    assert runs(TOKENIZER, ids, mask) == [first, f"Answer two.{END}"]
    assert (ids == TOKENIZER.token_to_id(END)).sum() == 5


def test_an_empty_list_of_calls_is_none() -> None:
    """Nemo's template writes calls where there is a list, and then nothing of the answer."""
    nemo = template_of("nemo")
    assert learned(nemo, [ONE, FIRST | {"tool_calls": []}]) == learned(nemo, [ONE, FIRST]) == [f"Answer one.{END}"]


@pytest.mark.parametrize("name", ["llama-3.3", "nemo"])
def test_content_beside_calls_that_the_template_leaves_out_is_refused(name: str) -> None:
    messages = [ONE, said("assistant", "Let me look.", tool_calls=[CALL]), said("tool", "x", tool_call_id="weather:0")]
    with pytest.raises(ValueError, match=r"^the chat template leaves out content of message 2; take it out"):
        learned(template_of(name), [*messages, SECOND], TOOLS)


def test_thoughts_in_a_content_that_the_template_leaves_out_are_refused() -> None:
    thinking = said("assistant", "<think>\nHm.\n</think>\n\nAnswer one.")
    with pytest.raises(ValueError, match=r"^the chat template leaves out a part of content of message 2; take it out"):
        learned(template_of("r1-distill"), [ONE, thinking])
    assert learned(template_of("qwen-3"), [ONE, thinking]) == [f"{thinking['content']}{END}"]
    assert learned(template_of("qwen-3"), [ONE, thinking, TWO, thinking]) == [
        f"Answer one.{END}",
        f"{thinking['content']}{END}",
    ]


def test_thoughts_before_a_loop_of_calls_may_be_left_out() -> None:
    """Qwen3's template shows what was thought since the last question."""
    think = {"reasoning_content": "Hm."}
    loop = [said("assistant", "", tool_calls=[CALL], **think), said("tool", "x"), SECOND | think]
    texts = learned(template_of("qwen-3"), [ONE, FIRST | think, TWO, *loop], TOOLS)
    assert [text.split("\n</think>")[0] for text in texts] == [f"Answer one.{END}", *["<think>\nHm."] * 2]
    assert learned(template_of("qwen-3"), [ONE, FIRST | {"thinking": "Hm."}])[0].startswith("<think>\nHm.")


NEEDS_A_QUESTION = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no question') }}{% endif %}"
)


@pytest.mark.parametrize("begin", [[], [said("system", "Be kind.")]])
@pytest.mark.parametrize("default", ["", "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"])
def test_templates_that_raise_before_the_first_question(begin: list[Any], default: str) -> None:
    for text in ("Welcome.", ""):
        greeting = [*begin, said("assistant", text), ONE, FIRST]
        assert learned(NEEDS_A_QUESTION + default + CHATML, greeting) == [f"{text}{END}", f"Answer one.{END}"]


def test_a_template_without_a_generation_prompt_lets_the_assistant_write_its_header() -> None:
    bare = CHATML.split("{% if add")[0]
    header = "<|im_start|>assistant\n"
    assert learned(bare, CONVERSATIONS["turns"]) == [f"{header}Answer one.{END}", f"{header}Answer two.{END}"]
    system = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    assert learned(system + bare, CONVERSATIONS["greeting"])[0] == f"{header}Welcome.{END}"


def test_texts_of_others_inside_a_turn_are_refused() -> None:
    quoting = CHATML.replace("+ message.content", "+ (messages[0].content if loop.last else '') + message.content")
    with pytest.raises(
        ValueError, match=r"message 1 inside a turn of the assistant|message 2, the assistant's, does not"
    ):
        learned(quoting, [ONE, FIRST])
    marked = "{% generation %}" + CHATML.split("{% if add")[0] + "{% endgeneration %}"
    with pytest.raises(ValueError, match="has message 1 inside a turn of the assistant, where it would be learned"):
        learned(marked, [ONE, FIRST])


def test_texts_that_the_template_does_not_mark_are_refused() -> None:
    part = CHATML.replace("message.content +", "(message.content if loop.first else g(message.content)) +")
    macro = "{% macro g(text) %}{{ text[:6] }}{% generation %}{{ text[6:] }}{% endgeneration %}{% endmacro %}"
    with pytest.raises(ValueError, match="has texts of message 2 outside of what the assistant says there"):
        learned(macro + part, [ONE, FIRST])


def test_turns_that_are_not_asked_for_are_not_learned() -> None:
    assert learned(CHATML, CONVERSATIONS["turns"], asked=[False, True]) == [f"Answer two.{END}"]
    assert learned(CHATML, CONVERSATIONS["turns"], asked=[False, False]) == []


def test_whoever_is_marked_as_generated_but_is_not_the_assistant_is_refused() -> None:
    marked = CHATML.replace("message.content +", "g(message.content) +")
    macro = "{% macro g(text) %}{% generation %}{{ text }}{% endgeneration %}{% endmacro %}"
    with pytest.raises(ValueError, match="has message 1 inside a turn of the assistant, where it would be learned"):
        learned(macro + marked, CONVERSATIONS["turns"])


def test_a_turn_may_be_marked_in_parts() -> None:
    header = "{{ '<|im_start|>' + message.role + '\n' }}"
    parts = "{% generation %}{{ message.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"
    other = "{{ message.content }}<|im_end|>"
    both = f"{{% if message.role == 'assistant' %}}{parts}{{% else %}}{other}{{% endif %}}"
    template = f"{{% for message in messages %}}{header}{both}{{{{ '\n' }}}}{{% endfor %}}"
    assert learned(template, CONVERSATIONS["turns"]) == [f"Answer one.{END}", f"Answer two.{END}"]
    assert learned(template, CONVERSATIONS["empty"]) == [END, f"Answer two.{END}"]
    assert learned(template, CONVERSATIONS["turns"], asked=[False, True]) == [f"Answer two.{END}"]


def test_messages_that_the_template_leaves_out_are_refused() -> None:
    silent = CHATML.replace("{{ '<|im_start|>' +", "{% if message.role != 'tool' %}{{ '<|im_start|>' +").replace(
        "{% endfor %}", "{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="leaves out content of message 3; take it out"):
        learned(silent, [ONE, FIRST, said("tool", "Wet."), SECOND])


def test_a_template_that_forgets_earlier_turns_is_refused() -> None:
    """Not only what the assistant thought, which may be missing there."""
    forgetful = CHATML.replace(
        "message.content +", "(message.content if loop.index0 in (0, 2, 3) or loop.last else '') +"
    )
    with pytest.raises(ValueError, match="leaves out content of message 2; take it out"):
        learned(forgetful, CONVERSATIONS["turns"])
    called = CHATML.replace(
        "message.content +", "(message.tool_calls | tojson if loop.last and message.tool_calls else message.content) +"
    )
    with pytest.raises(ValueError, match="leaves out tool_calls of message 2"):
        learned(called, [ONE, FIRST | {"tool_calls": [CALL]}, TWO, SECOND])


def test_a_prompt_that_is_always_there_closes_no_turn() -> None:
    always = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
    assert learned(always, CONVERSATIONS["turns"]) == [f"Answer one.{END}", f"Answer two.{END}"]


ALPACA = (
    "{% for m in messages %}{{ '### Question:\n' if m.role == 'user' else '### Answer:\n' }}{{ m.content + '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Answer:\n' }}{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{{ 'USER: ' + m.content + ' ' if m.role == 'user' else 'ASSISTANT: ' + m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@pytest.mark.parametrize("text", ["Answer one.", "### Answer:\n", "\n\n### Question:\nwhat?\n\n", "ASSISTANT: USER: "])
def test_templates_whose_headers_are_text(text: str) -> None:
    talk = [said("user", text), said("assistant", text), said("user", text), SECOND]
    assert learned(ALPACA, talk) == [f"{text}\n\n", "Answer two.\n\n"]
    assert learned(VICUNA, talk) == [f" {text}{END}", f" Answer two.{END}"]


def test_random_texts_are_learned_as_they_stand() -> None:
    """Texts made of what tokenizers, templates and marks are made of, in conversations of all lengths."""
    chance = random.Random(3)
    bits = ["a", " ", "\n", "'", '"', "\\", "{", "<think>", "</think>", "user", "assistant\n", "<tool_call>", "ü", "漢"]
    bits += [
        END,
        "<|im_start|>",
        "<|im_start|>assistant\n",
        "<|endoftext|>",
        "㐀",
        "\U0010fffc",
        "\U00030000",
        "{% x %}",
    ]
    for _ in range(60):
        roles = [("user", "assistant")[place % 2] for place in range(chance.randint(2, 6))]
        talk = [said(role, "".join(chance.choices(bits, k=chance.randint(0, 6)))) for role in roles]
        expected = [f"{each['content']}{END}" for each in talk if each["role"] == "assistant"]
        assert learned(CHATML, talk) == expected, talk


@pytest.mark.parametrize("wrong", [{"content": 5}, {"content": True}, {"content": {"a": "b"}}, {"reasoning": ["x"]}])
def test_what_is_no_text_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="message 2, of 'assistant', says something that is no text"):
        learned(CHATML, [ONE, FIRST | wrong])


def test_parts_may_be_texts() -> None:
    joined = CHATML.replace("message.content +", "message.content | join +")
    assert learned(joined, [said("user", ["a", END]), said("assistant", ["b", END])]) == [f"b{END}{END}"]
    for role in ("assistant", "user"):
        with pytest.raises(ValueError, match=f"message 1, of '{role}', has a part of type 'image', but models are"):
            learned(joined, [said(role, ["a", {"type": "image"}])])


@pytest.mark.parametrize("place", ["message.content + '\\n' + message.content", "message.content"])
def test_a_template_that_writes_an_answer_twice_is_refused(place: str) -> None:
    """Otherwise only the first one is learned, and no stop behind it."""
    template = CHATML.replace("message.content", place)
    if place == "message.content":
        template += "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="what message 2, the assistant's, says more than once"):
        learned(template, [ONE, FIRST])


def test_a_generation_prompt_that_ends_inside_of_a_control_token_is_refused() -> None:
    """The model would be asked with other tokens than it learned behind."""
    template = CHATML.replace("'<|im_start|>' + message.role + '\n'", "message.role + '<|im_start|>'")
    template = template.replace("'<|im_start|>assistant\n'", "'assistant<|im_start'")
    with pytest.raises(ValueError, match="message 2, the assistant's, does not begin where the chat template asks"):
        learned(template, [ONE, FIRST])
