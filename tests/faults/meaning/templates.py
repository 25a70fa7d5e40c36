"""Changed chat templates: small edits of their source, after which they still render."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

Edit = Callable[[str, random.Random], str]

_TAG = re.compile(r"\{%-?.*?-?%\}|\{\{-?.*?-?\}\}", re.S)
_TEXT = re.compile(r"'(?:[^'\\\n]|\\.)*'")
_CONTENT = re.compile(r"message\.content|message\['content'\]|(?<![\w.'])content(?![\w'])")
_ROLE = re.compile(r"([!=]=) ('(?:user|system|assistant|tool|developer)')")
_IF = re.compile(r"\{%(-?) if (?!not )(.*?) (-?)%\}", re.S)
_PROMPT = re.compile(r"\{%-? ?if add_generation_prompt.*?%\}", re.S)
_FILTERS = (
    "trim",
    "upper",
    "replace('a', 'b')",
    "string",
    "trim + '\\n'",
    "tojson",
    "replace('\\n', ' ')",
    "capitalize",
)
_MORE = ("\n", " ", "x", "assistant", ": ", "<b>", "###", "\n\n")
_WHOLE = (
    "{{% for message in messages %}}{{{{ message.role }}}}{{% endfor %}}\n{0}",
    "{0}{{{{ eos_token }}}}",
    "{{{{ bos_token }}}}{0}",
    "{0}\n",
    "{{{{ 'Begin.\\n' }}}}{0}",
    "{0}{{{{ messages[0].content }}}}",
    "{0}{{{{ messages[-1].content }}}}",
    "{{% set messages = messages[-3:] %}}{0}",
    "{{% set messages = messages[::-1] %}}{0}",
    "{{% set messages = [{{'role': 'system', 'content': 'Be brief.'}}] + messages %}}{0}",
    "{{% set messages = messages + [{{'role': 'user', 'content': 'Go on.'}}] %}}{0}",
    "{{% if messages[0].role == 'assistant' %}}{{{{ raise_exception('no') }}}}{{% endif %}}{0}",
    "{{% if not messages %}}{{{{ raise_exception('none') }}}}{{% endif %}}{0}",
    "{0}{{% if messages[-1].role == 'assistant' and not add_generation_prompt %}}{{{{ eos_token }}}}{{% endif %}}",
    "{0}{{% if messages | length > 2 %}}{{{{ eos_token }}}}{{% endif %}}",
)
"""What is put around a whole template."""


def _one(pattern: re.Pattern[str], changed: Callable[[re.Match[str], random.Random], str]) -> Edit:
    """An edit of one of the places that match."""

    def edit(source: str, randomly: random.Random) -> str:
        found = list(pattern.finditer(source))
        if not found:
            return source
        match = randomly.choice(found)
        return source[: match.start()] + changed(match, randomly) + source[match.end() :]

    return edit


def _with_spaces(match: re.Match[str], randomly: random.Random) -> str:
    """A tag that takes the spaces beside it, or leaves them, and a line break before or behind it."""
    tag = match[0]
    ends = [tag[2:3] == "-", tag[-3:-2] == "-"]
    inner = tag[2 + ends[0] : len(tag) - 2 - ends[1]]
    ends[randomly.randrange(2)] ^= True
    return f"{tag[:2]}{'-' * ends[0]}{inner}{'-' * ends[1]}{tag[-2:]}" + randomly.choice(("", "\n", " "))


def _other_text(match: re.Match[str], randomly: random.Random) -> str:
    inner, more = match[0][1:-1], randomly.choice(_MORE).replace("\n", "\\n")
    return (
        f"'{randomly.choice((inner + more, more + inner, inner[:-2] if inner[-2:-1] != chr(92) else inner, more, ''))}'"
    )


def _other_role(match: re.Match[str], randomly: random.Random) -> str:
    if randomly.random() < 0.3:
        return f"{'!=' if match[1] == '==' else '=='} {match[2]}"
    return f"{match[1]} '{randomly.choice(('user', 'system', 'assistant', 'tool'))}'"


def _expression(match: re.Match[str], randomly: random.Random) -> str:
    """An expression twice, not at all, or under a condition."""
    said = match[0]
    if not said.startswith("{{"):
        return said
    where = randomly.choice(("loop.last", "not loop.last", "loop.first", "not loop.first", "add_generation_prompt"))
    return randomly.choice(("", said + said, f"{{% if {where} %}}{said}{{% endif %}}", said + "{{ eos_token }}"))


def _swapped(source: str, randomly: random.Random) -> str:
    """Two expressions that follow each other, the other way round."""
    tags = [match for match in _TAG.finditer(source) if match[0].startswith("{{")]
    if len(tags) < 2:
        return source
    at = randomly.randrange(len(tags) - 1)
    one, two = tags[at], tags[at + 1]
    return source[: one.start()] + two[0] + source[one.end() : two.start()] + one[0] + source[two.end() :]


def _around(source: str, randomly: random.Random) -> str:
    return randomly.choice(_WHOLE).format(source)


def _moved_token(source: str, randomly: random.Random) -> str:
    """A control token in place of another one, or at the other end of its text."""
    tokens = sorted(set(re.findall(r"<[|｜][^|｜'\s]+[|｜]>|</?s>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>", source)))
    if not tokens:
        return source
    old, new = randomly.choice(tokens), randomly.choice([*tokens, "", "##"])
    return source.replace(old, new, randomly.choice((1, -1)))


EDITS: dict[str, Edit] = {
    "spaces": _one(_TAG, _with_spaces),
    "text": _one(_TEXT, _other_text),
    "role": _one(_ROLE, _other_role),
    "filter": _one(_CONTENT, lambda match, randomly: f"({match[0]} | {randomly.choice(_FILTERS)})"),
    "condition": _one(_IF, lambda match, randomly: f"{{%{match[1]} if not ({match[2]}) {match[3]}%}}"),
    "prompt": _one(
        _PROMPT,
        lambda match, randomly: randomly.choice(
            (
                "{% if true %}",
                "{% if false %}",
                match[0] + "{{ '<think>\\n' }}",
                match[0] + "\n",
                "{% if add_generation_prompt and messages[-1].role == 'user' %}",
                "{% if add_generation_prompt or messages[-1].role == 'user' %}",
            )
        ),
    ),
    "expression": _one(_TAG, _expression),
    "order": _swapped,
    "whole": _around,
    "token": _moved_token,
}


def changed_template(source: str, randomly: random.Random) -> tuple[str, str]:
    """Names of the edits, and the template after them."""
    done = []
    for _ in range(randomly.choice((0, 1, 1, 1, 2, 2, 3))):
        name = randomly.choice(list(EDITS))
        changed = EDITS[name](source, randomly)
        if changed != source:
            done.append(name)
        source = changed
    return ", ".join(done) or "none", source
