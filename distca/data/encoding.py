"""Blocks of text to token ids, in order, in this process or in several."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any, Literal

import numpy as np

from distca.data.left_out import MOST_NAMED
from distca.data.recipe import Encoded, Encoder, Recipe
from distca.data.sources.json_lines import NoTextError
from distca.data.texts import Block, Refused
from distca.data.texts.blocks import BLOCK_BYTES
from distca.errors import DataError

Bad = Literal["error", "skip"]
"""The treatment of documents that cannot be read or tokenized."""
_AHEAD = 2
"""Blocks that wait for each process, so that none is idle while results are written."""


def processes_for(text_bytes: int) -> int:
    """How many processes tokenize so much text: one per CPU that this process may use, fewer where starting them would
    take longer than they save."""
    return min(len(os.sched_getaffinity(0)), text_bytes // (4 * BLOCK_BYTES) + 1)


@dataclass(frozen=True)
class Tokens:
    """A block's documents as ids, as bytes; those that gave no token, or nothing to learn, are left out.

    Attributes:
        ids: int32, of all documents one after the other.
        lengths: int32 by document.
        mask: uint8 by token, whether it is to be learned; empty where all are.
        empty: how many gave no token, or nothing to learn.
        bad: how many cannot be read or tokenized, and were left out too.
        named: the first of these, with what is wrong with them.
    """

    ids: bytes
    lengths: bytes
    mask: bytes
    empty: int
    bad: int = 0
    named: tuple[str, ...] = ()


def encoded_blocks(
    blocks: Iterator[Block], recipe: Recipe, encoder: Encoder, processes: int, bad: Bad = "error"
) -> Iterator[tuple[Block, Tokens]]:
    """Every block with its tokens, in order.

    Args:
        blocks: of the texts.
        recipe: how documents become ids; processes open it themselves.
        encoder: the recipe, opened, for this process.
        processes: with one it is this process.
        bad: what happens to documents that cannot be read or tokenized.

    Raises:
        DataError: a file cannot be read, a document where ``bad`` is error cannot be read or tokenized, or a process
            died.
    """
    if processes == 1:
        for block in blocks:
            yield block, encode_block(block, encoder, recipe, bad)
        return
    # Started afresh: a forked copy of a process with threads, CUDA or process groups would not be safe.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (recipe, bad))
    waiting: deque[tuple[Block, Future[Tokens]]] = deque()
    try:
        for block in blocks:
            waiting.append((block, pool.submit(_encode, block)))
            if len(waiting) > processes * _AHEAD:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    except BrokenProcessPool:
        raise DataError(
            "A process that tokenizes was killed, most likely for want of memory; start again with fewer of them "
            "(`processes`), it goes on from there."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _next(waiting: deque[tuple[Block, Future[Tokens]]]) -> tuple[Block, Tokens]:
    block, future = waiting.popleft()
    return block, future.result()


def encode_block(block: Block, encoder: Encoder, recipe: Recipe, bad: Bad = "error") -> Tokens:
    """A block's tokens.

    Raises:
        DataError: ``bad`` is error, and names the first document that cannot be read or tokenized.
    """
    kept: list[Encoded] = []
    refused: list[Refused] = []
    empty = 0
    for document in encoded_documents(block, encoder, recipe):
        if isinstance(document, Refused):
            if bad == "error":
                raise document.error()
            refused.append(document)
        elif learns(document):
            kept.append(document)
        else:
            empty += 1
    return Tokens(
        _joined([ids for ids, _ in kept], np.int32),
        np.array([len(ids) for ids, _ in kept], np.int32).tobytes(),
        _joined([mask for _, mask in kept if mask is not None], np.uint8),
        empty,
        len(refused),
        tuple(each.said for each in refused[:MOST_NAMED]),
    )


def learns(document: Encoded) -> bool:
    """Whether something is learned of a document; its first token has nothing before it."""
    ids, mask = document
    return len(ids) > 0 and (mask is None or bool(mask[1:].any()))


def encoded_documents(block: Block, encoder: Encoder, recipe: Recipe) -> list[Encoded | Refused]:
    """A block's documents in order, encoded where that can be done."""
    documents = list(block.documents(recipe.field, recipe.beside))
    read = [(where, value) for where, value in documents if not isinstance(value, Refused)]
    encoded: Iterator[Encoded | Refused]
    try:
        encoded = iter(encoder.encode([value for _, value in read]))
    except (ValueError, RecursionError):
        # Only one by one does it show which document it was.
        encoded = (_encode_one(encoder, *each) for each in read)
    return [value if isinstance(value, Refused) else next(encoded) for _, value in documents]


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.integer]) -> bytes:
    return b"".join(array.astype(dtype).tobytes() for array in arrays)


def _encode_one(encoder: Encoder, where: str, value: Any) -> Encoded | Refused:
    try:
        return encoder.encode([value])[0]
    except NoTextError as error:
        return Refused(f"{where}: {error}", "correct or remove it, name another `field`")
    except UnicodeDecodeError:
        return Refused(
            f"{where} is not UTF-8 text, which this tokenizer needs", "correct or remove it, use the tokenizer bytes"
        )
    except RecursionError:
        return Refused(f"{where} holds JSON nested too deep to be read", "correct or remove it")
    except ValueError as error:
        return Refused(f"{where} cannot be tokenized ({error})", "change the document or the tokenizer")


_encoder: tuple[Encoder, Recipe, Bad]
"""The arguments of ``encode_block`` that stay the same in a process of the pool. They are set when it starts."""


def _begin(recipe: Recipe, bad: Bad) -> None:
    """Open the tokenizer, and end with the process that started this one, however that ends."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are what is parallel
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is the parent's to act on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = recipe.open(), recipe, bad


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: Block) -> Tokens:
    return encode_block(block, *_encoder)
