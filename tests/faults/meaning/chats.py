"""Holds a conversation through a chat template against transformers: the same ids, and only the assistant learned.

What is learned is judged without what the encoder proves itself: by words that only one text has, by transformers'
rendering of the conversation until a turn with a generation prompt, and by its rendering until behind that turn.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from distca.data.chat import ChatEncoder
from tests.data.templates.chats import byte_tokenizer, encoder
from tests.data.templates.families.table import FAMILIES, template_of
from tests.faults.meaning.conversations import Conversation, changed_conversation, with_tokens
from tests.faults.meaning.templates import changed_template

_CLOCKS = {"strftime_now('%d %B %Y')": "'26 July 2024'", "strftime_now('%Y-%m-%d')": "'2024-07-26'"}
_TRIES = 30


@dataclass(frozen=True)
class Case:
    """A conversation, a template and a tokenizer's family.

    Attributes:
        family: whose control tokens the tokenizer has.
        edits: of its template.
        template: after them.
        conversation: with what stands for control tokens in its texts.
    """

    family: str
    edits: str
    template: str
    conversation: Conversation


@cache
def control_of(family: str) -> list[str]:
    """The control tokens of a family."""
    chosen = FAMILIES[family]
    return list(dict.fromkeys([chosen.begin, chosen.end, *chosen.control.split()]))


@cache
def _judge_of(family: str) -> Any:
    """The family's tokenizer as transformers has it."""
    import transformers

    chosen = FAMILIES[family]
    tokenizer = byte_tokenizer(control_of(family), chosen.words.split())
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=chosen.begin, eos_token=chosen.end
    )


def encoder_of(family: str, template: str) -> ChatEncoder:
    """What encodes conversations, with the tokenizer of a family."""
    chosen = FAMILIES[family]
    tokenizer = byte_tokenizer(control_of(family), chosen.words.split())
    return encoder(tokenizer, template, bos_token=chosen.begin, eos_token=chosen.end)


def rendered(case: Case, until: int | None = None, prompt: bool = False) -> str | None:
    """What transformers writes of a conversation until a message; None where the template raises."""
    try:
        made: str = _judge_of(case.family).apply_chat_template(
            case.conversation.messages[:until],
            tools=case.conversation.tools,
            chat_template=case.template,
            add_generation_prompt=prompt,
            tokenize=False,
        )
    except Exception:  # whatever a template raises
        return None
    return made


def changed_case(number: int, seed: int, kind: str) -> Case:
    """A case, which transformers renders, with a changed template or with the template of a family.

    Args:
        number: of the case.
        seed: of all cases.
        kind: templates or conversations.
    """
    family = list(FAMILIES)[number % len(FAMILIES)]
    source = template_of(family)
    for said, date in _CLOCKS.items():
        source = source.replace(said, date)
    for attempt in range(_TRIES):
        randomly = random.Random(f"{seed} {kind} {number} {attempt}")
        edits, template = changed_template(source, randomly) if kind == "templates" else ("none", source)
        has_tools = "tool" in source and randomly.random() < 0.3
        tries_tokens = kind == "conversations" and randomly.random() < 0.4
        conversation = changed_conversation(randomly, control_of(family), has_tools, tries_tokens)
        case = Case(family, edits, template, conversation)
        if (kind != "templates" or edits != "none") and rendered(case) is not None:
            break
    return case


def judge(case: Case) -> tuple[str, str]:
    """What became of a case, and what is said of it: served, refused, different or traceback."""
    control, talk = control_of(case.family), case.conversation
    messages, tools = with_tokens(talk.messages, control), with_tokens(talk.tools, control)
    try:
        ids, learned = encoder_of(case.family, case.template).conversation(messages, tools)
    except ValueError as error:
        said = str(error)
        return (
            ("refused", said) if type(error).__name__ in ("ValueError", "DataError") and said else ("traceback", said)
        )
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    text = rendered(case)
    if text is None:
        return "different", "transformers does not render it"
    theirs = _judge_of(case.family)
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert learned is not None
    if with_tokens(text, control) == text:
        if ids.tolist() != expected:
            return "different", "other ids"
    elif wrong := _other_tokens(theirs, ids, text, control):
        return "different", wrong
    pieces = [_bytes(theirs, number) for number in ids.tolist()]
    flags = np.repeat(learned, [len(each) for each in pieces])
    wrong = _wrong_words(talk, b"".join(pieces), flags) or _wrong_ends(case, with_tokens(text, control), flags)
    return ("different", wrong) if wrong else ("served", "")


def _bytes(theirs: Any, number: int) -> bytes:
    return str(theirs.decode([number], skip_special_tokens=False)).encode() if number >= 256 else _byte_of()[number]


@cache
def _byte_of() -> list[bytes]:
    """The byte of each id of the tokenizer: its letters in order, of which those without a picture come last."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in shown]
    letters = {chr(each): each for each in shown} | {chr(256 + at): each for at, each in enumerate(hidden)}
    return [bytes([letters[letter]]) for letter in sorted(letters)]


def _other_tokens(theirs: Any, ids: np.ndarray, text: str, control: list[str]) -> str:
    """What is wrong with ids of a text in which control tokens were put: to the judge, these are other words."""
    found = b"".join(_bytes(theirs, number) for number in ids.tolist())
    if found != with_tokens(text, control).encode():
        return "another text"
    special = [number for number in ids.tolist() if number in theirs.all_special_ids or number in _specials(theirs)]
    expected = [n for n in theirs(text, add_special_tokens=False)["input_ids"] if n in _specials(theirs)]
    return "" if special == expected else "a control token of a text became one, or one of the template's did not"


def _specials(theirs: Any) -> set[int]:
    return {number for number, each in theirs.added_tokens_decoder.items() if each.special}


def _wrong_words(talk: Conversation, whole: bytes, flags: np.ndarray) -> str:
    """What is wrong with words: those of others are never learned, those of an assistant's message alike."""
    last = max((at for at, each in enumerate(talk.messages) if each["role"] == "assistant"), default=-1)
    by_message: dict[int, list[bool]] = {}
    for word, number in talk.words.items():
        role = talk.messages[number]["role"] if number >= 0 else "tools"
        found = re.finditer(re.escape(word.encode()), whole, re.IGNORECASE)
        places = [flags[match.start() : match.end()] for match in found]
        if role != "assistant":
            if any(place.any() for place in places):
                return f"{word} of message {number + 1}, {role}, is learned"
            continue
        if any(place.any() != place.all() for place in places):
            return f"{word} of message {number + 1} is learned in part"
        if places:
            by_message.setdefault(number, []).append(any(place.all() for place in places))
        elif word not in talk.optional and word not in _behind_thoughts(talk, number):
            return f"{word} of message {number + 1} is not there"
    for number, seen in by_message.items():
        if not all(seen) and (any(seen) or number == last):
            return f"a text of message {number + 1}, the assistant's, is not learned"
    return ""


def _behind_thoughts(talk: Conversation, number: int) -> set[str]:
    """Words of a content that templates take for thoughts, which they may leave out behind another question."""
    content = talk.messages[number]["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return {word for word in talk.words for text in texts if word in "</think>".join(text.split("</think>")[:-1])}


def _wrong_ends(case: Case, text: str, flags: np.ndarray) -> str:
    """What is wrong with begins and ends of turns, by transformers' renderings until there."""
    control, talk = control_of(case.family), case.conversation
    if "generation %}" in case.template.replace("-%}", "%}"):
        return ""
    plain = rendered(case) or ""
    sizes = np.cumsum(
        [0, *(len(with_tokens(each, control).encode()) for each in re.split(r"(qzjtokenjzq\d\d\.)", plain))]
    )
    if sizes[-1] != len(flags):
        return "another length"
    learned_words = {
        number
        for word, number in talk.words.items()
        if number >= 0
        and talk.messages[number]["role"] == "assistant"
        and (at := text.encode().find(word.encode())) >= 0
        and flags[at]
    }
    tokens = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))
    for number in sorted(learned_words):
        before = rendered(case, number, prompt=True) if number else None
        if before is not None and plain.startswith(before):
            at = len(with_tokens(before, control).encode())
            is_first = talk.messages[number - 1]["role"] != "assistant"  # whose turn the next role's token may close
            if at < len(flags) and (not flags[at] or (is_first and at and flags[at - 1])):
                return f"message {number + 1} is not learned from behind the generation prompt on"
        until = rendered(case, number + 1)
        closed = "" if until is None else until.rstrip()
        words = [plain.rfind(word) + len(word) for word, its in talk.words.items() if its == number and word in plain]
        token = tokens.search(closed, max(words))
        if token and plain.startswith(closed[: token.end()]):
            start, stop = (len(with_tokens(closed[:each], control).encode()) for each in token.span())
            if not flags[start:stop].all():
                return f"{token[0]} behind message {number + 1} is not learned"
            follower = talk.messages[number + 1]["role"] if number + 1 < len(talk.messages) else "assistant"
            ends = plain.startswith(closed) and token.end() == len(closed)
            goes_on = flags[stop : stop + 1].any() and text.encode()[stop : stop + 1].strip()
            if follower != "assistant" and ends and goes_on:
                return f"more than {token[0]} behind message {number + 1} is learned"
    return ""


def as_kept(case: Case) -> dict[str, Any]:
    """A case as it is written."""
    return asdict(case) | {"conversation": {"messages": case.conversation.messages, "tools": case.conversation.tools}}
