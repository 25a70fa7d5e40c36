"""Conversion: texts to Megatron's .bin/.idx, tokenized in several processes, with a sidecar that names the vocabulary.

PREFIX.bin, PREFIX.idx   the tokens, and where documents begin
PREFIX.mask              of conversations, which tokens are to be learned
PREFIX.json              how they were made
PREFIX.partial/          what is done so far, while it is being made; one that was interrupted goes on from there
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from distca.data.encoding import Bad, Tokens, encoded_blocks
from distca.data.left_out import BAD, MOST_NAMED, LeftOut
from distca.data.recipe import Recipe
from distca.data.sources.index_file import Index
from distca.data.sources.indexed import mask_file, sidecar, without_suffix
from distca.data.texts import Texts
from distca.errors import DataError, system_words
from distca.words import count

_SAVE_S = 10.0
"""Between two notes of what is done; so much is done again after an interruption."""
_ELSEWHERE = "choose another output"
_COUNTED = ("blocks", "read", "empty", "bad")
"""Figures of what is done, by the names that they have in a note of it."""
_PLACING = "placing"
"""A file in PREFIX.partial while the finished files are moved: what is not there any more is where it belongs."""


@dataclass(frozen=True)
class Converted:
    """The results of a conversion, as recorded in the sidecar PREFIX.json.

    Attributes:
        tokenizer: ``bytes`` or the file of the tokenizer.
        vocabulary: token ids are in [0, vocabulary).
        documents: documents written.
        tokens: tokens written.
        empty: documents that gave no token, or of a conversation nothing to learn, which were left out.
        bad: documents that could not be read or tokenized, and were left out too.
        bad_named: the first of these, with what is wrong with them.
    """

    tokenizer: str
    vocabulary: int
    documents: int
    tokens: int
    empty: int
    bad: int = 0
    bad_named: tuple[str, ...] = ()


def convert(
    texts: Texts,
    recipe: Recipe,
    output: str,
    *,
    processes: int = 1,
    bad: Bad = "error",
    advanced: Callable[[int], None] = lambda _: None,
    elsewhere: str = _ELSEWHERE,
) -> Converted:
    """Tokenize every document into OUTPUT.bin and OUTPUT.idx.

    A conversion that fails leaves nothing. One that is killed leaves OUTPUT.partial, and the next one of the same
    texts goes on from there.

    Args:
        texts: the documents.
        recipe: how they become ids.
        output: path of the files, without suffix; .bin or .idx at its end is taken off.
        processes: that tokenize; with one it is this process.
        bad: what happens to documents that cannot be read or tokenized: ``error`` ends the conversion, ``skip`` leaves
            them out.
        advanced: called with the number of bytes of the files that were done since the last call.
        elsewhere: for messages, how to have the files written to another place.

    Raises:
        DataError: if an output file exists or cannot be written, a document cannot be read or tokenized, or no token
            comes out.
        VersionError: a package is missing.
    """
    prefix = check_output(output, elsewhere)
    encoder = recipe.open()
    sources = {"kind": texts.kind, "texts": texts.state(), "recipe": recipe.identity(), "bad": bad}
    try:
        with _Partial.held(prefix, encoder.vocabulary, sources, elsewhere) as partial:
            advanced(partial.read)
            blocks = islice(texts.blocks(recipe.field, recipe.beside), partial.blocks, None)
            for block, tokens in encoded_blocks(blocks, recipe, encoder, processes, bad):
                partial.add(tokens, block.read)
                advanced(block.read)
            return partial.finish(recipe, encoder.vocabulary)
    except OSError as error:
        raise _unwritable(prefix, error, elsewhere) from None


def check_output(output: str, elsewhere: str = _ELSEWHERE) -> str:
    """The path of the files that ``output`` names, without suffix, once it is clear that they can be written.

    The folder they go to is made where it is missing.

    Raises:
        DataError: if ``output`` names no file, a file of that name exists, or the folder cannot be written to.
    """
    prefix = without_suffix(output)
    if os.path.basename(prefix) in ("", ".", ".."):
        raise DataError(f"The output {output!r} names no file; give the path of the files to write, without suffix.")
    try:
        _refuse_existing(prefix, elsewhere)
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(prefix=Path(prefix).name, dir=Path(prefix).parent):
            pass
    except OSError as error:
        raise _unwritable(prefix, error, elsewhere) from None
    return prefix


class _Partial:
    """The unfinished output of a conversion: tokens and lengths as they come, and a note of how much of them counts."""

    def __init__(self, prefix: str, vocabulary: int, sources: dict[str, Any]) -> None:
        self._prefix, self._folder = prefix, _folder_of(prefix)
        self._dtype = _dtype(vocabulary)
        self._take_back()
        self._sources = json.loads(json.dumps(sources))
        done = self._noted()
        self.blocks, self.read, self.empty, self.bad = (done.get(name, 0) for name in _COUNTED)
        self.named: list[str] = done.get("named", [])
        self._files = {name: (self._folder / name).open("ab") for name in ("bin", "lengths", "mask")}
        for name, file in self._files.items():
            file.truncate(done.get(name, 0))
        self._saved = time.monotonic()

    @staticmethod
    @contextmanager
    def held(prefix: str, vocabulary: int, sources: dict[str, Any], elsewhere: str) -> Iterator[_Partial]:
        """Held by this process; gone after an error, but not after an interruption.

        Raises:
            DataError: another process is at it.
        """
        folder = _folder_of(prefix)
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"Another process is writing {prefix}.bin; wait until it is done, or {elsewhere}."
                ) from None
            except OSError:
                pass  # a file system without locks
            partial = _Partial(prefix, vocabulary, sources)
            try:
                yield partial
            except Exception:
                partial.give_up()
                for file in _placed(prefix).values():
                    file.unlink(missing_ok=True)
                (folder / _PLACING).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
                raise
            finally:
                partial.close()
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, tokens: Tokens, read: int) -> None:
        """Append a block's tokens; OSError where that fails."""
        self._files["bin"].write(np.frombuffer(tokens.ids, np.int32).astype(self._dtype).tobytes())
        self._files["lengths"].write(tokens.lengths)
        self._files["mask"].write(tokens.mask)
        self.blocks, self.read = self.blocks + 1, self.read + read
        self.empty, self.bad = self.empty + tokens.empty, self.bad + tokens.bad
        self.named = [*self.named, *tokens.named][:MOST_NAMED]
        if time.monotonic() - self._saved > _SAVE_S:
            self._save()

    def finish(self, recipe: Recipe, vocabulary: int) -> Converted:
        """Write index and sidecar, and move all files to where they belong; OSError where that fails."""
        self.close()
        lengths = np.fromfile(self._folder / "lengths", np.int32)
        if not len(lengths):
            raise DataError(
                f"The tokenizer {recipe.tokenizer.name} made no token to learn of "
                f"{count(self.empty + self.bad, 'document')}; nothing was written.{self._first_bad()}"
            )
        Index.of_documents(lengths.tolist(), self._dtype).write(self._folder / "idx")
        done = Converted(
            *(recipe.tokenizer.name, vocabulary, len(lengths), int(lengths.sum(dtype=np.int64)), self.empty, self.bad),
            tuple(self.named),
        )
        mask = {"mask": (self._folder / "mask").stat().st_size > 0}
        written = json.dumps(asdict(done) | recipe.identity() | mask, indent=2)
        (self._folder / "json").write_text(written + "\n", encoding="utf-8")
        _refuse_existing(self._prefix)
        (self._folder / _PLACING).touch()
        for name, file in _files(self._prefix).items():
            if name != "mask" or mask["mask"]:
                (self._folder / name).rename(file)
        return done

    def _first_bad(self) -> str:
        return f" {LeftOut(self.bad, BAD, tuple(self.named))}." if self.bad else ""

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def give_up(self) -> None:
        """Close all files, whatever a full disk does not take of them."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def _take_back(self) -> None:
        """Files of a conversion that was killed while it moved them."""
        for name, file in _placed(self._prefix).items():
            if file.exists():
                file.rename(self._folder / name)
        (self._folder / _PLACING).unlink(missing_ok=True)

    def _save(self) -> None:
        """Note what is done, once it is on disk."""
        note = {name: getattr(self, name) for name in (*_COUNTED, "named")} | {"sources": self._sources}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            note[name] = file.tell()
        fresh = self._folder / "done.new"
        fresh.write_text(json.dumps(note), encoding="utf-8")
        fresh.replace(self._folder / "done")
        self._saved = time.monotonic()

    def _noted(self) -> dict[str, Any]:
        """Returns the note of an interrupted conversion of the same texts with the same tokenizer; empty where there is
        none."""
        try:
            done = json.loads((self._folder / "done").read_text(encoding="utf-8"))
            whole = all((self._folder / name).stat().st_size >= done[name] for name in ("bin", "lengths", "mask"))
            return done if whole and done["sources"] == self._sources else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def _folder_of(prefix: str) -> Path:
    return Path(f"{prefix}.partial")


def _files(prefix: str) -> dict[str, Path]:
    """The files of a corpus; the index is last, as nothing opens the others without it."""
    return {
        "json": sidecar(prefix),
        "mask": mask_file(prefix),
        "bin": Path(f"{prefix}.bin"),
        "idx": Path(f"{prefix}.idx"),
    }


def _placed(prefix: str) -> dict[str, Path]:
    """The files that a conversion has moved to where they belong, by name; none once all are there."""
    folder = _folder_of(prefix)
    if not (folder / _PLACING).exists() or not (folder / "idx").exists():
        return {}
    return {name: file for name, file in _files(prefix).items() if not (folder / name).exists()}


def _refuse_existing(prefix: str, elsewhere: str = _ELSEWHERE) -> None:
    unfinished = _placed(prefix)
    for name, file in _files(prefix).items():
        if file.exists() and name not in unfinished:
            raise DataError(f"{file} exists already; delete it or {elsewhere}.")


def _unwritable(prefix: str, error: OSError, elsewhere: str) -> DataError:
    return DataError(f"{prefix}.bin cannot be written ({system_words(error)}); {elsewhere} or make room for it.")


def _dtype(vocabulary: int) -> type[np.integer]:
    """The smallest type of the format that holds every id."""
    for dtype in (np.uint8, np.uint16):
        if vocabulary <= np.iinfo(dtype).max + 1:
            return dtype
    return np.int32
