"""A few megabytes of text: what one process tokenizes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from distca.data.sources.json_lines import record_of, remedy_of
from distca.errors import DataError

BLOCK_BYTES = 1 << 21
"""Enough that handing it to another process costs nothing beside tokenizing it; a hundred of them fit into memory."""
_FEW = 8


@dataclass(frozen=True)
class Row:
    """A document with what stands beside it.

    Attributes:
        value: of the document's field.
        others: by name, of the other fields that were asked for and are there.
    """

    value: Any
    others: dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """A document that cannot be read or tokenized.

    Attributes:
        said: which one it is, and what is wrong with it.
        remedy: what to do about it.
    """

    said: str
    remedy: str

    def error(self) -> DataError:
        """Both as a sentence, with the setting by which such documents are left out."""
        return DataError(f"{self.said}; {self.remedy}, or set `bad` to skip to leave such documents out.")


class Block(Protocol):
    """Documents that follow each other in the files; can be pickled.

    Attributes:
        read: bytes of the files that were read for it, as they lie on disk.
    """

    @property
    def read(self) -> int: ...

    def documents(self, field: str, beside: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
        """(where it is from, text as UTF-8 bytes or the value of ``field``) of every document. Where it has some of the
        fields ``beside``, a :class:`Row`; where it cannot be read, :class:`Refused`."""
        ...

    def first_documents(self) -> Block:
        """The same with a few of its documents."""
        ...


@dataclass(frozen=True)
class LinesBlock:
    """Whole lines of a JSON Lines file.

    Attributes:
        file: its name.
        first: number of the first line, from 1.
        content: the lines.
        read: as of Block.
    """

    file: str
    first: int
    content: bytes
    read: int

    def documents(self, field: str, beside: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
        for number, line in enumerate(self.content.split(b"\n"), self.first):
            if line.strip():
                where = f"{self.file}, line {number}"
                try:
                    record = record_of(line, field)
                except ValueError as error:
                    yield where, Refused(f"{where}: {error}", remedy_of(error))
                    continue
                yield where, _with(record[field], {name: record.get(name) for name in beside})

    def first_documents(self) -> Block:
        lines = self.content.split(b"\n", _FEW)[:_FEW]
        return replace(self, content=b"\n".join(lines))


@dataclass(frozen=True)
class RowsBlock:
    """Consecutive rows of one column of a table.

    Attributes:
        file: its name.
        first: number of the first row, from 1.
        values: of the column.
        read: as of Block.
        others: values of other columns, by name.
    """

    file: str
    first: int
    values: list[Any]
    read: int
    others: dict[str, list[Any]] = field(default_factory=dict)

    def documents(self, field: str, beside: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
        for number, value in enumerate(self.values):
            where = f"{self.file}, row {self.first + number}"
            if value is None:
                nothing = f"{where} has nothing in {field!r}"
                yield where, Refused(nothing, "take out such rows, name another `field`")
                continue
            yield where, _with(value, {name: column[number] for name, column in self.others.items()})

    def first_documents(self) -> Block:
        others = {name: column[:_FEW] for name, column in self.others.items()}
        return replace(self, values=self.values[:_FEW], others=others)


@dataclass(frozen=True)
class FilesBlock:
    """Whole files, a document each.

    Attributes:
        files: their names.
        contents: by file.
        read: as of Block.
    """

    files: list[str]
    contents: list[bytes]
    read: int

    def documents(self, field: str, beside: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
        yield from zip(self.files, self.contents, strict=True)

    def first_documents(self) -> Block:
        return FilesBlock(self.files[:_FEW], self.contents[:_FEW], self.read)


def _with(value: Any, others: dict[str, Any]) -> Any:
    there = {name: other for name, other in others.items() if other is not None}
    return Row(value, there) if there else value
