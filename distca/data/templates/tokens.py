"""A rendered conversation to ids, in which only the template's control tokens become control tokens."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

import numpy as np

from distca.data.templates.marks import TEMPLATE
from distca.data.templates.rendering import Rendering
from distca.data.templates.template import Spans

_ALIASES = (*range(0x30000, 0x3134A), *range(0x2CEB0, 0x2EBE0))
"""Code points of rare letters, of which the template's control tokens get other names where texts hold theirs."""


class ChatTokenizer:
    """Encodes rendered conversations as transformers does.

    Attributes:
        vocabulary: token ids are in [0, vocabulary).
        control: matches control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a ``tokenizers.Tokenizer``."""
        self._special = {number: each for number, each in tokenizer.get_added_tokens_decoder().items() if each.special}
        names = sorted((each.content for each in self._special.values() if each.content), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        tokenizer.post_processor = None  # which only adds tokens, and takes spaces out of the places of tokens
        self._tokenizer = tokenizer
        self._renamed: tuple[Any, dict[str, str], dict[int, int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The second tokenizer is made anew, since its pickle would forget that control tokens are text to it."""
        return self.__dict__ | {"_renamed": None}

    def encode(
        self, text: str, rendering: Rendering, spans: Spans, speakers: Set[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a conversation, int64, and which of them are learned.

        Args:
            text: as the template writes it.
            rendering: the same with marks.
            spans: of what is learned.
            speakers: numbers of the messages whose texts they hold.

        Raises:
            ValueError: a text cannot be encoded, makes a control token, or shares a token with what is learned.
        """
        own = [match.span() for match in self.control.finditer(rendering.text)]
        is_ordinary = own == [match.span() for match in self.control.finditer(text)]
        ids, places = self._encoded(text) if is_ordinary else self._encoded_apart(text, own)
        learned = np.zeros(len(ids), bool)
        for start, stop in spans:
            learned |= (places[:, 0] < stop) & (places[:, 1] > start)
        self._check(ids, places, learned, rendering, speakers)
        return ids, learned

    def _encoded(self, text: str, tokenizer: Any = None) -> tuple[np.ndarray, np.ndarray]:
        try:
            encoding = (tokenizer or self._tokenizer).encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception for a text that its model cannot encode
            raise ValueError(str(error)) from None
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def _encoded_apart(self, text: str, own: Spans) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text in which control tokens stand at other places too than those of the template.

        The template's get names as long as their own, which a second tokenizer knows; to it, all others are text.
        """
        tokenizer, names, numbers = self._with_other_names(set(text))
        parts, last = [], 0
        for start, stop in own:
            parts += [text[last:start], names[text[start:stop]]]
            last = stop
        ids, places = self._encoded("".join([*parts, text[last:]]), tokenizer)
        return np.array([numbers.get(number, number) for number in ids.tolist()], np.int64), places

    def _with_other_names(self, used: set[str]) -> tuple[Any, dict[str, str], dict[int, int]]:
        """Returns a tokenizer, the names by which it knows control tokens, and their ids by its own."""
        if self._renamed is None or any(name[0] in used for name in self._renamed[1].values()):
            from tokenizers import AddedToken, Tokenizer

            letters = (letter for letter in map(chr, _ALIASES) if letter not in used)
            tokenizer: Any = Tokenizer.from_str(self._tokenizer.to_str())
            tokenizer.encode_special_tokens = True
            names: dict[str, str] = {}
            numbers: dict[int, int] = {}
            for number, token in self._special.items():
                names[token.content] = name = next(letters) * len(token.content)
                tokenizer.add_tokens(
                    [
                        AddedToken(
                            name,
                            single_word=token.single_word,
                            lstrip=token.lstrip,
                            rstrip=token.rstrip,
                            normalized=token.normalized,
                        )
                    ]
                )
                numbers[tokenizer.token_to_id(name)] = number
            self._renamed = tokenizer, names, numbers
        return self._renamed

    def _check(
        self, ids: np.ndarray, places: np.ndarray, learned: np.ndarray, rendering: Rendering, speakers: Set[int]
    ) -> None:
        """Check tokens against the places of texts: a token may reach over the end of one."""
        control = np.isin(ids, list(self._special))
        before = np.concatenate([[0], np.cumsum(rendering.message != TEMPLATE)])
        if (before[places[control, 1]] > before[places[control, 0]]).any():
            raise ValueError("the tokenizer makes a control token of the text of a message")
        foreign = ~np.isin(rendering.message, [TEMPLATE, *speakers])
        before = np.concatenate([[0], np.cumsum(foreign)])
        if (before[places[learned, 1]] > before[places[learned, 0]]).any():
            raise ValueError("a token holds what the assistant says together with what another message says")
