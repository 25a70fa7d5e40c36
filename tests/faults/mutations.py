"""Changes of a file's bytes, each chosen by a random generator."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

_EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**40)
_WORDS = (
    *("-1", "0", "1e309", "NaN", "null", "true", "[]", "{}", '""', "9" * 30, "2.5", "a: b", "- c", "\\ud800"),
    *("!!python/object/apply:os.system ['true']", "&a [*a]", "[" * 3000, "\x00", "é", "~", "1_000", "0x10", ".inf"),
)


def _flip(data: bytearray, randomly: random.Random) -> bytearray:
    for _ in range(randomly.choice([1, 1, 1, 8])):
        data[randomly.randrange(len(data))] ^= 1 << randomly.randrange(8)
    return data


def _cut(data: bytearray, randomly: random.Random) -> bytearray:
    return data[: randomly.randrange(len(data))]


def _empty(_: bytearray, __: random.Random) -> bytearray:
    return bytearray()


def _insert(data: bytearray, randomly: random.Random) -> bytearray:
    at = randomly.randrange(len(data) + 1)
    return data[:at] + randomly.randbytes(randomly.choice([1, 3, 64])) + data[at:]


def _blank(data: bytearray, randomly: random.Random) -> bytearray:
    at, size = randomly.randrange(len(data)), randomly.choice([1, 16, 512])
    data[at : at + size] = bytes(len(data[at : at + size]))
    return data


def _repeat(data: bytearray, randomly: random.Random) -> bytearray:
    at, size = randomly.randrange(len(data)), randomly.choice([4, 100, 1000])
    return data[: at + size] + data[at:]


def _number(data: bytearray, randomly: random.Random) -> bytearray:
    """Another number where there may be one, aligned as in .idx files."""
    size = randomly.choice([4, 8])
    shift = randomly.choice([0, 2])  # the header has 34 bytes
    if len(data) < size + shift:
        return bytearray(b"\0")
    at = shift + randomly.randrange((len(data) - shift) // size) * size
    packed = struct.pack("<Q", randomly.choice(_EXTREMES))[:size]
    data[at : at + size] = packed[: len(data) - at]
    return data


def _word(data: bytearray, randomly: random.Random) -> bytearray:
    """Another word in place of one, as in text, JSON and YAML."""
    words = bytes(data).replace(b",", b" , ").replace(b":", b": ").split(b" ")
    words[randomly.randrange(len(words))] = randomly.choice(_WORDS).encode("utf-8", "surrogatepass")
    return bytearray(b" ".join(words))


def _line(data: bytearray, randomly: random.Random) -> bytearray:
    lines = bytes(data).splitlines(keepends=True) or [b""]
    lines.insert(randomly.randrange(len(lines)), lines.pop(randomly.randrange(len(lines))))
    del lines[randomly.randrange(len(lines))]
    return bytearray(b"".join(lines))


class _Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def _command(data: bytearray, randomly: random.Random) -> bytearray:
    """A pickle that runs a command, as a file of torch's or by itself."""
    if randomly.random() < 0.5:
        return bytearray(pickle.dumps(_Command(), protocol=randomly.choice([0, 2, 4])))
    import torch

    file = io.BytesIO()
    torch.save({"step": _Command()}, file)
    return bytearray(file.getvalue())


_CHANGES: dict[str, Callable[[bytearray, random.Random], bytearray]] = {
    "bits flipped": _flip,
    "cut off": _cut,
    "emptied": _empty,
    "bytes inserted": _insert,
    "a block of zeros": _blank,
    "a part twice": _repeat,
    "another number": _number,
    "another word": _word,
    "lines moved and lost": _line,
    "a pickled command": _command,
}
NAMES = list(_CHANGES)
_OF_BYTES = ("bits flipped", "cut off", "emptied", "bytes inserted", "a block of zeros", "a part twice")
BINARY = (*_OF_BYTES, "another number", "another number")
TEXT = (*_OF_BYTES, "another word", "another word", "another word", "another word", "lines moved and lost")
PICKLE = (*_OF_BYTES, "a pickled command")


def change(data: bytes, kinds: tuple[str, ...], randomly: random.Random) -> tuple[bytes, str]:
    """A changed copy of a file's bytes, and the name of the change."""
    name = randomly.choice(kinds)
    changed = _CHANGES[name](bytearray(data or b" "), randomly)
    return bytes(changed), name
