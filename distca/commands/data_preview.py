"""``distca data preview``: what is learned of conversations, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distca.commands.options import check_least
from distca.data.encoding import encoded_documents, learns
from distca.data.find_recipe import find_recipe
from distca.data.left_out import MOST_NAMED
from distca.data.recipe import Encoded, Recipe
from distca.data.texts import Refused, Texts, open_texts
from distca.data.tokenizer import load_json
from distca.errors import OptionError
from distca.words import count

if TYPE_CHECKING:
    from rich.text import Text

_MARKS = {"learned": ("⟦", "⟧"), "control": ("‹", "›")}
"""Around what is learned and around control tokens, where there are no colours."""
_STYLES = {"learned": "green", "control": "bold underline"}


def preview(
    *,
    path: str,
    tokenizer: str,
    source: Literal["jsonl", "parquet", "arrow"] = "jsonl",
    field: str | None = None,
    conversation: int = 1,
    sample: int = 1000,
) -> None:
    """Print one conversation's tokens with those that are learned in colour, and count what is learned of a sample.

    Args:
        path: file or folder of the conversations.
        tokenizer: a model's folder with a tokenizer.json and a chat template.
        source: jsonl = JSON Lines, also .gz and .zst; parquet = Parquet files; arrow = a folder that the library
            datasets saved to disk.
        field: of each JSON object, or column of each table, that holds the conversation; messages by default.
        conversation: which one to print, by its number from 1.
        sample: how many are counted, from the first.
    """
    from distca.log import printer

    check_least(1, conversation=conversation, sample=sample)
    recipe, texts = find_recipe(tokenizer, field, conversations=True), open_texts(source, path)
    seen = list(islice(_documents(texts, recipe), max(conversation, sample)))
    if len(seen) < conversation:
        raise OptionError(f"--conversation is {conversation}, but {path} holds {count(len(seen), 'conversation')}.")
    console = printer()
    coloured = console.color_system is not None and not console.no_color
    shown = seen[conversation - 1]
    if isinstance(shown, Refused):
        console.print(f"Conversation {conversation} is refused: {shown.said}.", soft_wrap=True)
    else:
        console.print(_key(coloured))
        console.print(_text(shown, load_json(Path(recipe.tokenizer.name)), coloured), soft_wrap=True)
    console.print()
    _print_counts(seen[:sample], path)


def _documents(texts: Texts, recipe: Recipe) -> Iterator[Encoded | Refused]:
    encoder = recipe.open()
    for block in texts.blocks(recipe.field, recipe.beside):
        yield from encoded_documents(block, encoder, recipe)


def _key(coloured: bool) -> Text:
    """Returns a legend of the colours or marks in the text below."""
    from rich.text import Text

    key = Text()
    for number, (kind, name) in enumerate((("learned", "learned"), ("control", "control token"))):
        key.append("  " if number else "")
        key.append(name if coloured else name.join(_MARKS[kind]), _STYLES[kind] if coloured else "")
    return key


def _text(document: Encoded, tokenizer: Any, coloured: bool) -> Text:
    """A conversation's tokens as text, with what is learned and what is a control token in colour, or between marks."""
    from rich.text import Text

    ids, mask = document
    learned = np.ones(len(ids), bool) if mask is None else mask
    added = np.isin(ids, list(tokenizer.get_added_tokens_decoder()))
    shown, within = Text(), False
    for start, stop in _runs(ids, learned, added):
        piece = _visible(_decoded(tokenizer, ids, start, stop))
        if coloured:
            kinds = [kind for kind, is_kind in (("learned", learned[start]), ("control", added[start])) if is_kind]
            shown.append(piece, " ".join(_STYLES[kind] for kind in kinds))
            continue
        if within != bool(learned[start]):
            shown.append(_MARKS["learned"][within])
            within = not within
        shown.append(piece.join(_MARKS["control"]) if added[start] else piece)
    shown.append(_MARKS["learned"][1] if within else "")
    return shown


def _runs(ids: np.ndarray, learned: np.ndarray, added: np.ndarray) -> Iterator[tuple[int, int]]:
    """Stretches of tokens that are alike; every added token is one of its own."""
    changes = (np.diff(learned) != 0) | added[1:] | added[:-1]
    borders = [0, *(np.flatnonzero(changes) + 1).tolist(), len(ids)]
    yield from pairwise(borders)


def _decoded(tokenizer: Any, ids: np.ndarray, start: int, stop: int) -> str:
    """The text of a stretch, as it is behind the token before it: decoders change what begins a text."""
    before = ids[max(start - 1, 0) : start].tolist()
    whole: str = tokenizer.decode([*before, *ids[start:stop].tolist()], skip_special_tokens=False)
    return whole[len(tokenizer.decode(before, skip_special_tokens=False)) :]


def _visible(text: str) -> str:
    """A text with names in place of characters that would do something to a terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def _print_counts(seen: list[Encoded | Refused], path: str) -> None:
    from rich.table import Table

    from distca.log import printer

    refused = [each for each in seen if isinstance(each, Refused)]
    encoded = [each for each in seen if not isinstance(each, Refused)]
    used = [each for each in encoded if learns(each)]
    tokens = sum(len(ids) for ids, _ in used)
    learned = sum(len(ids) - 1 if mask is None else int(mask[1:].sum()) for ids, mask in used)
    printer().print(f"The first {count(len(seen), 'conversation')} of {path}:", soft_wrap=True)
    table = Table()
    table.add_column("")
    table.add_column("number", justify="right")
    for label, value in (
        ("conversations that are learned", f"{len(used):,}"),
        ("with nothing to learn, left out", f"{len(encoded) - len(used):,}"),
        ("refused", f"{len(refused):,}"),
        ("tokens", f"{tokens:,}"),
        ("tokens that are learned", f"{learned:,} ({learned / max(tokens, 1):.1%})"),
        ("tokens of the longest", f"{max((len(ids) for ids, _ in used), default=0):,}"),
    ):
        table.add_row(label, value)
    printer().print(table)
    for each in refused[:MOST_NAMED]:
        printer().print(f"refused: {each.said}", soft_wrap=True)
    if len(refused) > MOST_NAMED:
        printer().print(f"refused: {len(refused) - MOST_NAMED:,} more")
