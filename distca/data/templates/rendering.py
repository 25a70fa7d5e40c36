"""A rendered conversation, of which every character is known to be the template's or that of a message."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from distca.data.templates.marks import TEMPLATE, Marks, code_points
from distca.data.templates.template import Spans

PART_OF_CONTENT = "a part of content"
"""The name of a content of which something is shown, such as what stands behind thoughts."""


class Rendering:
    """A conversation as a template writes it, with marks in place of its texts."""

    def __init__(self, text: str, spans: Spans, marks: Marks) -> None:
        self.text, self.spans, self._sources = text, spans, marks.sources
        self._codes = code_points(text)
        self.source = marks.source_by_code[self._codes]  # by character
        self.message = np.array([source.message for source in marks.sources])[self.source]  # by character
        self.places = np.flatnonzero(self.message != TEMPLATE)

    @cached_property
    def _by_source(self) -> dict[int, np.ndarray]:
        ordered = self.places[np.argsort(self.source[self.places], kind="stable")]
        numbers, starts = np.unique(self.source[ordered], return_index=True)
        return dict(zip(numbers.tolist(), np.split(ordered, starts)[1:], strict=True))

    def shown(self, message: int) -> tuple[np.ndarray, list[str]]:
        """Returns the places where a message's texts stand, each once, and names of texts that are not there whole."""
        places, missing = [], []
        for number, source in enumerate(self._sources):
            if source.message != message:
                continue
            found = self._by_source.get(number, np.zeros(0, np.int64))[: len(source.marks)]
            places.append(found)
            if source.name and not np.array_equal(np.sort(self._codes[found]), np.sort(code_points(source.marks))):
                missing.append(PART_OF_CONTENT if source.name == "content" and len(found) else source.name)
        return np.sort(np.concatenate(places)) if places else np.zeros(0, np.int64), missing

    def is_repeated(self, message: int, names: Sequence[str]) -> bool:
        """Returns whether a text of these names stands more than once."""
        return any(
            len(self._by_source.get(number, ())) > len(source.marks)
            for number, source in enumerate(self._sources)
            if source.message == message and source.name in names
        )

    def begin(self, message: int) -> tuple[int, int]:
        """Returns where what the template writes before a message begins, and where the message's text does."""
        own, _ = self.shown(message)
        if len(own):
            return self._before(own[0]), int(own[0])
        earlier = [int(shown[-1]) for each in range(message) if len(shown := self.shown(each)[0])]
        start = max(earlier, default=-1) + 1
        return start, self._next(start)

    def end(self, message: int) -> tuple[int, int]:
        """Returns where what the template writes behind a message begins, and where the next text does."""
        own, _ = self.shown(message)
        start = int(own[-1]) + 1 if len(own) else self.begin(message)[0]
        return start, self._next(start)

    @property
    def tail(self) -> str:
        """The text that the template writes behind the last one."""
        return self.text[int(self.places[-1]) + 1 if len(self.places) else 0 :]

    def _before(self, place: int) -> int:
        index = int(np.searchsorted(self.places, place))
        return int(self.places[index - 1]) + 1 if index else 0

    def _next(self, place: int) -> int:
        index = int(np.searchsorted(self.places, place))
        return int(self.places[index]) if index < len(self.places) else len(self.text)
