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
from typing import Any

import numpy as np

from distca.data.recipe import Encoded, Encoder, Recipe
from distca.data.sources.json_lines import NoTextError
from distca.data.texts import Block
from distca.data.texts.blocks import BLOCK_BYTES
from distca.errors import DataError

_AHEAD = 2
"""Blocks that wait for each process, so that none is idle while results are written."""


def processes_for(text_bytes: int) -> int:
    """How many processes tokenize so much text: one per CPU that this process may use, fewer where starting them would
    take longer than they save."""
    return min(len(os.sched_getaffinity(0)), text_bytes // (4 * BLOCK_BYTES) + 1)


@dataclass(frozen=True)
class Tokens:
    """A block's documents as ids, as bytes.

    Attributes:
        ids: int32, of all documents one after the other.
        lengths: int32 by document.
        mask: uint8 by token, whether it is to be learned; empty where all are.
        empty: documents that gave no token, or nothing to learn, and were left out.
    """

    ids: bytes
    lengths: bytes
    mask: bytes
    empty: int


def encoded_blocks(
    blocks: Iterator[Block], recipe: Recipe, encoder: Encoder, processes: int
) -> Iterator[tuple[Block, Tokens]]:
    """Every block with its tokens, in order.

    Args:
        blocks: of the texts.
        recipe: how documents become ids; processes open it themselves.
        encoder: the recipe, opened, for this process.
        processes: with one it is this process.

    Raises:
        DataError: a document that cannot be read or tokenized, or a process that died.
    """
    if processes == 1:
        for block in blocks:
            yield block, encode_block(block, encoder, recipe)
        return
    # Started afresh: a forked copy of a process with threads, CUDA or process groups would not be safe.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (recipe,))
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


def encode_block(block: Block, encoder: Encoder, recipe: Recipe) -> Tokens:
    """A block's tokens; DataError names the document that has none."""
    places, values = [], []
    for where, value in block.documents(recipe.field, recipe.beside):
        places.append(where)
        values.append(value)
    try:
        documents = encoder.encode(values)
    except ValueError:
        # Only one by one does it show which document it was.
        documents = [_encode_one(encoder, *each) for each in zip(places, values, strict=True)]
    kept = [(ids, mask) for ids, mask in documents if len(ids) and (mask is None or mask[1:].any())]
    return Tokens(
        _joined([ids for ids, _ in kept], np.int32),
        np.array([len(ids) for ids, _ in kept], np.int32).tobytes(),
        _joined([mask for _, mask in kept if mask is not None], np.uint8),
        len(documents) - len(kept),
    )


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.integer]) -> bytes:
    return b"".join(array.astype(dtype).tobytes() for array in arrays)


def _encode_one(encoder: Encoder, where: str, value: Any) -> Encoded:
    try:
        return encoder.encode([value])[0]
    except NoTextError as error:
        raise DataError(f"{where}: {error}; correct or remove it, or name another `field`.") from None
    except UnicodeDecodeError:
        raise DataError(
            f"{where} is not UTF-8 text, which this tokenizer needs; correct or remove it, or use the tokenizer bytes."
        ) from None
    except ValueError as error:
        raise DataError(
            f"{where} cannot be tokenized: the tokenizer says {str(error)!r}; change the document or the tokenizer."
        ) from None


_encoder: tuple[Encoder, Recipe]
"""Of a process of the pool."""


def _begin(recipe: Recipe) -> None:
    """Open the tokenizer, and end with the process that started this one, however that ends."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are what is parallel
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is the parent's to act on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = recipe.open(), recipe


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: Block) -> Tokens:
    return encode_block(block, *_encoder)
