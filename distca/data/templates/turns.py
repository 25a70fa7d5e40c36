"""The search for the assistant's turns in a rendered conversation. It finds where they begin and end, and checks that
nobody else speaks in them.

The whole rendering is searched. Other renderings, of the conversation until a turn or with one more message behind it,
only show what the template writes between two messages: which part of it asks the assistant to speak, and which part
closes its turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from distca.data.templates.closing import alike, closing
from distca.data.templates.marks import REASONING, TEMPLATE, Marks, text_of, texts_of
from distca.data.templates.rendering import PART_OF_CONTENT, Rendering
from distca.data.templates.template import ChatTemplate
from distca.errors import DistcaError

_PROBE: dict[str, Any] = {"role": "user", "content": "x"}
"""A message that stands where a template wants one, to see what it writes before and behind others."""
_ADVICE = "put {% generation %} and {% endgeneration %} around what the template writes of the assistant"


@dataclass(frozen=True)
class Turn:
    """The words of the assistant in one message.

    Attributes:
        message: its number, from 0.
        start: in the rendering, its first character.
        stop: in the rendering, behind what closes it.
        closed: whether something that the model can stop at closes it.
        asked: whether it begins where the template's generation prompt ends.
    """

    message: int
    start: int
    stop: int
    closed: bool
    asked: bool


class TurnFinder:
    """Finds the assistant's turns of one conversation.

    Attributes:
        text: the conversation as the template writes it.
        whole: the same with marks.
    """

    def __init__(
        self,
        template: ChatTemplate,
        control: re.Pattern[str],
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
    ) -> None:
        """Render the conversation.

        Args:
            template: of the tokenizer.
            control: matches control tokens of the tokenizer.
            messages: of the conversation.
            tools: that the assistant may call.

        Raises:
            ValueError: the template refuses the conversation, or its texts cannot be found in what it writes.
        """
        _check_texts(messages)
        self._template, self._control, self._roles = template, control, [each["role"] for each in messages]
        self.text, _ = template.render(list(messages), tools)
        _check_rendering(messages, self.text)
        said = "\n".join(texts_of([list(messages), tools, dict(template.tokens), _PROBE]))
        used = {*said, *template.source, *self.text}
        constants = [each for each in template.constants if len(each) > 1 and not (each.isalnum() or each.isspace())]
        looked_for = [each for each in constants if each in said and not control.search(each)]
        for kept in ([], looked_for) if looked_for else ([],):
            self._marks = Marks(used, control, kept)
            self._messages = [self._marks.message(number, each) for number, each in enumerate(messages)]
            self._probe = self._marks.message(len(messages), _PROBE)
            self._tools = self._marks.tools(tools)
            whole = self._rendered(self._messages)
            if whole is not None and self._marks.unmarked(whole.text) == self.text:
                self.whole = whole
                return
        raise ValueError(
            "the chat template changes the texts of messages, so that they cannot be found in what it writes"
        )

    def turns(self) -> list[Turn]:
        """Returns the assistant's turns that are to be learned.

        Raises:
            ValueError: the template leaves out what a message says, does not show where a turn begins, or lets
                somebody else speak in it.
        """
        for number, role in enumerate(self._roles):
            missing = self.whole.shown(number)[1]
            # Many templates leave out what the assistant thought before the last question.
            may_miss = role == "assistant" and {*missing} <= {*REASONING, PART_OF_CONTENT}
            if missing and not (may_miss and self._is_whole_when_last(number)):
                names = " and ".join(dict.fromkeys(missing))
                raise ValueError(
                    f"the chat template leaves out {names} of message {number + 1}; take it out, or write it where the "
                    "template shows it"
                )
            if role == "assistant" and self.whole.is_repeated(number, ("content", *REASONING)):
                raise ValueError(
                    f"the chat template writes what message {number + 1}, the assistant's, says more than once, so "
                    "that it is not known where its turn ends; write it once in the template"
                )
        turns = self._marked() if self._template.marks_turns else self._found()
        self._check(turns)
        return turns

    def _found(self) -> list[Turn]:
        turns = [self._turn(number) for number, role in enumerate(self._roles) if role == "assistant"]
        for turn in turns:
            if not turn.asked and (turn is turns[-1] or not self._is_asked_when_last(turn.message)):
                raise ValueError(
                    f"message {turn.message + 1}, the assistant's, does not begin where the chat template asks for it, "
                    f"behind {self._asking(turn.message)!r}: the model would never say it there; {_ADVICE}"
                )
        learned = self._with_closed_silence([turn for turn in turns if turn.asked])
        if learned and self._roles[-1] == "assistant" and not any(turn.closed for turn in learned):
            start, stop = self.whole.end(len(self._roles) - 1)
            if start == stop:
                raise ValueError(
                    "the chat template closes a turn only where another follows, and none does, so that nothing would "
                    "teach the model to stop; end turns in the template"
                )
        return learned

    def _with_closed_silence(self, turns: list[Turn]) -> list[Turn]:
        """Returns turns in which those without a text are closed by a token that closes another, where it is there.

        A template may write more before a text that is not there if no turn follows, which then tells nothing.
        """
        tokens = [self._control.findall(self.whole.text, turn.start, turn.stop)[-1] for turn in turns if turn.closed]
        made = []
        for turn in turns:
            start, stop = self.whole.end(turn.message)
            if not turn.closed and tokens and start < turn.start:
                behind = re.compile("|".join(map(re.escape, tokens))).search(self.whole.text, turn.start, stop)
                turn = replace(turn, stop=behind.end(), closed=True) if behind else turn
            made.append(turn)
        return made

    def _turn(self, number: int) -> Turn:
        start, asked = self._start(number)
        behind, next_text = self.whole.end(number)
        own = len(self.whole.shown(number)[0])
        actual = self.whole.text[behind:next_text]
        other = self._otherwise(number)
        is_last = number == len(self._roles) - 1
        last, followed = (actual, other) if is_last else (other, actual)
        length, closed = closing(last, followed, is_last, 0 if own else start - behind, self._control)
        # A prompt that ends inside of a control token is other tokens when the model is asked.
        is_cut = any(each.start() < start < each.end() for each in self._control.finditer(self.whole.text))
        return Turn(number, start, max(behind + length, start), closed, asked and not is_cut)

    def _start(self, number: int) -> tuple[int, bool]:
        """Returns where a turn begins, and whether the template's generation prompt ends there."""
        begin, text = self.whole.begin(number)
        before = self.whole.text[begin:text]
        asking = self._asking(number)
        if number and asking is not None and before.startswith(asking):
            return begin + len(asking), True
        # What the template writes at the begin of conversations, or until the last question, may stand before it.
        asked, prompt = self._prompt
        if len(self.whole.shown(number)[0]):
            for rest in self._behind_prompt(number, asked):
                if before.endswith(prompt + rest):
                    return text - len(rest), True
        elif prompt and prompt in before:
            return begin + before.index(prompt) + len(prompt), True
        if asking is None:
            raise ValueError(
                f"the chat template does not show where message {number + 1}, the assistant's, begins; {_ADVICE}"
            )
        return text, False

    @cached_property
    def _prompt(self) -> tuple[str | None, str]:
        """Returns the text that the template writes behind a question to ask for a turn. With it comes the part of it
        that is there for that alone."""
        asked, plain = (self._rendered([self._probe], prompt) for prompt in (True, False))
        if asked is None or plain is None:
            return None, ""
        return asked.tail, asked.tail[alike(asked.tail, plain.tail, self._control) :]

    def _behind_prompt(self, number: int, asked: str | None) -> list[str]:
        """Returns what may follow the generation prompt before a message's text, with and without another behind."""
        found = []
        for behind in ([], [self._probe]) if asked is not None else ():
            alone = self._rendered([self._probe, self._messages[number], *behind])
            if alone is not None:
                start, stop = alone.begin(number)
                if (header := alone.text[start:stop]).startswith(str(asked)):
                    found.append(header[len(str(asked)) :])
        return found

    def _asking(self, number: int) -> str | None:
        """Returns what the template writes behind earlier messages to ask for a turn; None if it refuses to."""
        rendering = self._rendered(self._messages[:number], prompt=True)
        return None if rendering is None else rendering.tail

    def _otherwise(self, number: int) -> str | None:
        """Returns what would stand behind a turn if it were the last one, or if it is, if it were not."""
        if number == len(self._roles) - 1:
            rendering = self._rendered([*self._messages, self._probe])
        else:
            rendering = self._until(number)
        if rendering is None:
            return None
        start, stop = rendering.end(number)
        return rendering.text[start:stop]

    def _until(self, number: int) -> Rendering | None:
        """Returns the conversation until a turn, behind a question where the template wants one."""
        until = self._messages[: number + 1]
        rendering = self._rendered(until)
        if rendering is None:
            first = next(place for place, role in enumerate(self._roles) if role not in ("system", "developer"))
            rendering = self._rendered([*until[:first], self._probe, *until[first:]])
        return rendering

    def _is_whole_when_last(self, number: int) -> bool:
        rendering = self._rendered(self._messages[: number + 1])
        return rendering is not None and not rendering.shown(number)[1]

    def _is_asked_when_last(self, number: int) -> bool:
        rendering, asking = self._rendered(self._messages[: number + 1]), self._asking(number)
        if rendering is None or asking is None or number == 0:
            return False
        start, stop = rendering.begin(number)
        return rendering.text[start:stop].startswith(asking)

    def _marked(self) -> list[Turn]:
        """Returns what the template marks as generated."""
        speakers = [number for number, role in enumerate(self._roles) if role == "assistant"]
        if not speakers and self.whole.spans:
            raise ValueError("the chat template marks parts of it as generated, but the assistant does not speak in it")
        turns: list[Turn] = []
        for place, (start, stop) in enumerate(self.whole.spans):
            said = self.whole.message[start:stop]
            said = said[said != TEMPLATE]
            if len(said):
                number = int(said[0])
            else:  # an empty message, or what closes the turn that was marked before
                is_each = len(self.whole.spans) == len(speakers) or not turns
                number = speakers[min(place, len(speakers) - 1)] if is_each else turns[-1].message
            turns.append(Turn(number, start, stop, closed=True, asked=True))
        return turns

    def _check(self, turns: list[Turn]) -> None:
        """Check that nobody else speaks in turns, and that the assistant's texts are in its own ones."""
        inside = np.full(len(self.whole.text), -1)
        for turn in turns:
            inside[turn.start : turn.stop] = turn.message
        said, owner = self.whole.message[self.whole.places], inside[self.whole.places]
        speakers = [number for number, role in enumerate(self._roles) if role == "assistant"]
        others = (owner >= 0) & ((owner != said) | ~np.isin(said, speakers))
        if others.any():
            number = int(said[others][0])
            who = "a description of a tool" if number < 0 else f"message {number + 1}"
            raise ValueError(f"the chat template has {who} inside a turn of the assistant, where it would be learned")
        for number in speakers if self._template.marks_turns else [turn.message for turn in turns]:
            if not (inside[self.whole.shown(number)[0]] == number).all():
                raise ValueError(
                    f"the chat template has texts of message {number + 1} outside of what the assistant says there"
                )

    def _rendered(self, messages: list[dict[str, Any]], prompt: bool = False) -> Rendering | None:
        try:
            return Rendering(*self._template.render(messages, self._tools, prompt), self._marks)
        except DistcaError:
            raise
        except ValueError:
            return None


_NO_TEXT = ("image", "video", "audio")
"""Words in the type of a part of a message that a model would have to see or hear."""


def _check_rendering(messages: Sequence[dict[str, Any]], text: str) -> None:
    """Check that a rendering is Unicode, and that no list of parts stands in it as Python writes lists."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it is no Unicode text ({error.reason} at character {error.start})") from None
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if isinstance(content, list | dict) and content and str(content) in text:
            raise ValueError(
                f"the content of message {number} is a list of parts, which the chat template takes for text; write "
                "its text alone"
            )


def _check_texts(messages: Sequence[dict[str, Any]]) -> None:
    """Check that what messages say is text, whatever a template would make of other values."""
    for number, message in enumerate(messages, 1):
        content = message.get("content", "")
        is_text = isinstance(content, str | list) or (isinstance(content, dict) and message["role"] != "assistant")
        if isinstance(content, list) and message["role"] == "assistant":
            is_text = all(text_of(part) is not None for part in content)
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and any(other in kind for other in _NO_TEXT):
                raise ValueError(
                    f"message {number}, of {message['role']!r}, has a part of type {kind!r}, but models are trained on "
                    "text alone; leave such conversations out"
                )
        if not is_text or not all(isinstance(message.get(name, ""), str) for name in REASONING):
            raise ValueError(
                f"message {number}, of {message['role']!r}, says something that is no text; write it as one"
            )
