"""Twenty-five templates of twenty families, and what is learned of eight conversations, marked by hand.

The templates beside this file are written from the documented behaviour of each family, shortened where a conversation
cannot show the difference. A text in place of a list is the reason of a refusal, as a regular expression.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Learned = dict[str, list[str] | str]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


CALL = {"id": "weather:0", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": PARAMETERS}}]
ONE, TWO = said("user", "Question one?"), said("user", "Question two?")
FIRST, SECOND = said("assistant", "Answer one."), said("assistant", "Answer two.")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "turns": [ONE, FIRST, TWO, SECOND],
    "system": [said("system", "Be kind."), ONE, FIRST],
    "tools": [
        ONE,
        said("assistant", "", tool_calls=[CALL]),
        said("tool", "Wet.", tool_call_id="weather:0"),
        said("assistant", "It rains."),
    ],
    "thinking": [
        ONE,
        FIRST | {"reasoning_content": "Reason one."},
        TWO,
        SECOND | {"reasoning_content": "Reason two."},
    ],
    "greeting": [said("assistant", "Welcome."), ONE, FIRST],
    "asked": [ONE, FIRST, TWO],
    "empty": [ONE, said("assistant", ""), TWO, SECOND],
    "parts": [
        said(role, [{"type": "text", "text": text}]) for role, text in (("user", "Hello."), ("assistant", "Hi."))
    ],
}

FAILS = "the chat template fails: "
NO_TOOLS = "it has tools, but the chat template has no place for them"
NO_THOUGHTS = "the chat template leaves out reasoning_content of message 2"
NO_PARTS = "the content of message 1 is a list of parts, which the chat template takes for text"
ALTERNATE = f"{FAILS}(user and assistant must take turns|.*roles must alternate)"
UNASKED = "message 2, the assistant's, does not begin where the chat template asks for it, behind '.*<think>"
UNCLOSED = "the chat template closes a turn only where another follows, and none does"


def plain(turn: str, **other: list[str] | str) -> Learned:
    """What is learned where every turn is written alike.

    Args:
        turn: what is learned of one, with {} for what the assistant says.
        other: by conversation, what is otherwise.
    """
    one, two, hello, nothing = map(turn.format, ("Answer one.", "Answer two.", "Welcome.", ""))
    usual: Learned = {"turns": [one, two], "system": [one], "tools": NO_TOOLS, "thinking": NO_THOUGHTS}
    usual |= {"greeting": [hello, one], "asked": [one], "empty": [nothing, two], "parts": FAILS}
    return usual | other


@dataclass(frozen=True)
class Family:
    """A template's tokens and what is learned.

    Attributes:
        begin: its bos_token.
        end: its eos_token.
        control: other control tokens.
        learned: by conversation.
        words: added tokens that are no control tokens.
        tools: whether conversations with calls have descriptions of the tools too.
    """

    begin: str
    end: str
    control: str
    learned: Learned
    words: str = ""
    tools: bool = True


LLAMA_3 = "<|start_header_id|> <|end_header_id|> <|eom_id|>"
CHATML = "<|im_start|> <|endoftext|>"
INST = "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [SYSTEM_PROMPT]"
DEEPSEEK = (
    "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>'
MISTRAL_CALL = '[{"name": "weather", "arguments": {"city": "Bern"}, "id": "weather:0"}]</s>'
NO_THINK = "<think>\n\n</think>\n\n"
FINAL = "<|channel|>final<|message|>"
GLM = "\n<think></think>\n"

FAMILIES = {
    "llama-2": Family("<s>", "</s>", "<unk>", plain(" {} </s>", greeting=ALTERNATE)),
    "llama-3": Family("<|begin_of_text|>", "<|eot_id|>", LLAMA_3, plain("{}<|eot_id|>", parts=NO_PARTS)),
    "llama-3.3": Family(
        "<|begin_of_text|>",
        "<|eot_id|>",
        LLAMA_3,
        plain(
            "{}<|eot_id|>",
            parts=NO_PARTS,
            tools=['{"name": "weather", "parameters": {"city": "Bern"}}<|eot_id|>', "It rains.<|eot_id|>"],
        ),
    ),
    "chatml": Family("<|endoftext|>", "<|im_end|>", CHATML, plain("{}<|im_end|>")),
    "qwen-2.5": Family(
        "<|endoftext|>",
        "<|im_end|>",
        CHATML,
        plain("{}<|im_end|>", tools=[QWEN_CALL, "It rains.<|im_end|>"]),
        words="<tool_call> </tool_call>",
    ),
    "qwen-3": Family(
        "<|endoftext|>",
        "<|im_end|>",
        CHATML,
        {
            "turns": ["Answer one.<|im_end|>", f"{NO_THINK}Answer two.<|im_end|>"],
            "system": [f"{NO_THINK}Answer one.<|im_end|>"],
            "tools": [QWEN_CALL, f"{NO_THINK}It rains.<|im_end|>"],
            "thinking": ["Answer one.<|im_end|>", "<think>\nReason two.\n</think>\n\nAnswer two.<|im_end|>"],
            "greeting": ["Welcome.<|im_end|>", f"{NO_THINK}Answer one.<|im_end|>"],
            "asked": ["Answer one.<|im_end|>"],
            "empty": ["<|im_end|>", f"{NO_THINK}Answer two.<|im_end|>"],
            "parts": "the chat template leaves out content of message 1",
        },
        words="<tool_call> </tool_call> <think> </think>",
    ),
    "mistral-v1": Family("<s>", "</s>", "<unk>", plain("{}</s>", system=ALTERNATE, greeting=ALTERNATE)),
    "mistral-v3": Family(
        "<s>",
        "</s>",
        INST,
        plain(
            " {}</s>",
            greeting=ALTERNATE,
            system="the chat template leaves out content of message 1",  # it is for a last message of the user's
            tools=[f"[TOOL_CALLS] {MISTRAL_CALL}", " It rains.</s>"],
        ),
    ),
    "nemo": Family(
        "<s>",
        "</s>",
        INST,
        plain(
            "{}</s>",
            greeting=ALTERNATE,
            system="the chat template leaves out content of message 1",
            tools=[f"[TOOL_CALLS]{MISTRAL_CALL}", "It rains.</s>"],
        ),
    ),
    "tekken": Family("<s>", "</s>", f"{INST} [/SYSTEM_PROMPT] [IMG]", plain("{}</s>", parts=["Hi.</s>"])),
    "gemma-2": Family(
        "<bos>",
        "<eos>",
        "<start_of_turn> <end_of_turn>",
        plain("{}<end_of_turn>", system=f"{FAILS}System role", greeting=ALTERNATE, parts=NO_PARTS),
    ),
    "gemma-3": Family(
        "<bos>",
        "<eos>",
        "<start_of_turn> <end_of_turn> <start_of_image>",
        plain("{}<end_of_turn>", greeting=ALTERNATE, parts=["Hi.<end_of_turn>"]),
    ),
    "phi-3.5": Family("<s>", "<|endoftext|>", "<|end|> <|system|> <|user|> <|assistant|>", plain("{}<|end|>")),
    "phi-4": Family("<|endoftext|>", "<|im_end|>", "<|im_start|> <|im_sep|>", plain("{}<|im_end|>")),
    "gpt-oss": Family(
        "<|startoftext|>",
        "<|return|>",
        "<|start|> <|end|> <|message|> <|channel|> <|call|>",
        {
            "turns": [f"{FINAL}Answer one.", f"{FINAL}Answer two.<|return|>"],
            "system": [f"{FINAL}Answer one.<|return|>"],
            "tools": [
                ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>',
                f"{FINAL}It rains.<|return|>",
            ],
            "thinking": [
                f"{FINAL}Answer one.",
                f"<|channel|>analysis<|message|>Reason two.<|end|><|start|>assistant{FINAL}Answer two.<|return|>",
            ],
            "greeting": [f"{FINAL}Welcome.", f"{FINAL}Answer one.<|return|>"],
            "asked": [f"{FINAL}Answer one."],
            "empty": [FINAL, f"{FINAL}Answer two.<|return|>"],
            "parts": FAILS,
        },
    ),
    "glm-4.5": Family(
        "[gMASK]",
        "<|endoftext|>",
        "<sop> <|system|> <|user|> <|assistant|> <|observation|>",
        {
            "turns": [f"{GLM}Answer one.<|user|>", f"{GLM}Answer two."],
            "system": UNCLOSED,
            "tools": [
                f"{GLM}<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>"
                "<|observation|>",
                f"{GLM}It rains.",
            ],
            "thinking": [f"{GLM}Answer one.<|user|>", "\n<think>Reason two.</think>\nAnswer two."],
            "greeting": [f"{GLM}Welcome.<|user|>", f"{GLM}Answer one."],
            "asked": [f"{GLM}Answer one.<|user|>"],
            "empty": ["\n<think></think><|user|>", f"{GLM}Answer two."],
            "parts": UNCLOSED,
        },
        words="<think> </think> <tool_call> </tool_call>",
    ),
    "deepseek-v3": Family(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        DEEPSEEK,
        plain(
            "{}<｜end▁of▁sentence｜>",
            tools=[
                '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Bern"}'
                "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
                "It rains.<｜end▁of▁sentence｜>",
            ],
        ),
        tools=False,
    ),
    "r1": Family(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        DEEPSEEK,
        dict.fromkeys(("turns", "tools", "asked", "empty"), UNASKED)
        | {"system": UNASKED.replace("2", "3"), "greeting": UNASKED.replace("2", "1")}
        | {"thinking": NO_THOUGHTS, "parts": FAILS},
        words="<think> </think>",
        tools=False,
    ),
    "r1-distill": Family(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        DEEPSEEK,
        plain("{}<｜end▁of▁sentence｜>"),
        words="<think> </think>",
    ),
    "olmo": Family("<|endoftext|>", "<|endoftext|>", "<|system|>", plain("{}<|endoftext|>")),
    "granite": Family(
        "<|end_of_text|>",
        "<|end_of_text|>",
        "<|start_of_role|> <|end_of_role|> <|tool_call|>",
        plain(
            "{}<|end_of_text|>",
            tools=[
                '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bern"}}]<|end_of_text|>',
                "It rains.<|end_of_text|>",
            ],
        ),
    ),
    "command-r": Family(
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>",
        plain("{}<|END_OF_TURN_TOKEN|>", greeting=ALTERNATE),
    ),
    "smollm-3": Family(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        plain(
            "<|im_start|>assistant\n{}<|im_end|>\n",  # what the template marks, its header too
            tools="the chat template leaves out tool_calls of message 2",
            parts="the chat template leaves out content of message 1",
        ),
        words="<think> </think>",
    ),
    "minimax": Family(
        "]~!b[",
        "[e~[",
        "]~b]",
        dict.fromkeys(("turns", "tools", "asked", "empty", "parts"), UNASKED)
        | {"system": UNASKED.replace("2", "3"), "greeting": UNASKED.replace("2", "1")}
        | {"thinking": ["Reason two.\n</think>\n\nAnswer two.[e~["]},
        words="<think> </think>",
    ),
    "kimi": Family(
        "[BOS]",
        "[EOS]",
        "<|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
        plain(
            "{}<|im_end|>",
            parts=["Hi.<|im_end|>"],
            tools=[
                "<|tool_calls_section_begin|><|tool_call_begin|>weather:0<|tool_call_argument_begin|>"
                '{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
                "It rains.<|im_end|>",
            ],
        ),
    ),
}


def template_of(family: str) -> str:
    """Returns the template of a family, without the line break at its end."""
    return (Path(__file__).parent / f"{family}.jinja").read_text(encoding="utf-8").removesuffix("\n")
