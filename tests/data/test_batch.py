from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.data import Corpus, Sampler, rank_batch
from distca.errors import DataError
from distca.plan import lay_out


def everything(documents):
    return documents.choose(np.arange(len(documents)))


def nano_rows_of(batch, chunks):
    """Undo the interleaving: the columns of each nano-batch, in row order."""
    parts: list[list[np.ndarray]] = [[] for _ in batch.nano_rows]
    at = 0
    for _ in range(chunks):
        for nano, rows in enumerate(batch.nano_rows):
            parts[nano].append(np.arange(at, at + rows // chunks))
            at += rows // chunks
    assert at == len(batch.tokens)
    index = [np.concatenate(part) for part in parts]
    return [
        [column[rows] for column in (batch.tokens, batch.labels, batch.loss_mask, batch.positions)] for rows in index
    ]


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    whole = draw(st.booleans())
    rank_of = draw(st.lists(st.integers(0, ranks - 1), min_size=len(lengths), max_size=len(lengths)))
    chunks = draw(st.integers(1, 3))
    align = chunks * draw(st.integers(1, 4))
    return lengths, ranks, draw(st.integers(1, 2)), np.array(rank_of) if whole else None, chunks, align


@given(cases())
def test_all_ranks_together_hold_every_document_exactly_once(counting_source, case):
    lengths, ranks, nano_batches, rank_of, chunks, align = case
    documents = Corpus(counting_source(lengths), 50).train
    layouts = lay_out(lengths, ranks, nano_batches=nano_batches, rank_of=rank_of)
    seen: list[tuple[int, int, int, int]] = []
    for rank in range(ranks):
        batch = rank_batch(everything(documents), layouts, rank, align=align, chunks=chunks)
        assert len(batch.nano_rows) == nano_batches
        assert sum(batch.nano_rows) == len(batch.tokens)
        for layout, columns in zip(layouts, nano_rows_of(batch, chunks), strict=True):
            rows = int(layout.q_rows[rank])
            padded = len(columns[0])
            assert padded % align == 0
            assert align <= padded < max(rows, 1) + align
            assert not any(column[rows:].any() for column in columns)
            shards = layout.q.on_rank(rank)
            expected = [
                (int(document), position)
                for document, start, stop in zip(shards.document, shards.start, shards.stop, strict=True)
                for position in range(start, stop)
            ]
            tokens, labels, loss_mask, positions = (column[:rows].tolist() for column in columns)
            assert tokens == [1000 * document + position for document, position in expected]
            assert positions == [position for _, position in expected]
            seen += zip(tokens, labels, loss_mask, positions, strict=True)
    # Every token of every document once, its label the next token, no target on the last one, wherever it was cut.
    assert sorted(seen) == [
        (1000 * document + at, 1000 * document + at + 1 if at + 1 < length else 0, at + 1 < length, at)
        for document, length in enumerate(lengths)
        for at in range(length)
    ]


@given(cases())
def test_a_rank_reads_its_own_tokens_and_one_more_per_cut(counting_source, case):
    lengths, ranks, nano_batches, rank_of, _, _ = case
    layouts = lay_out(lengths, ranks, nano_batches=nano_batches, rank_of=rank_of)
    for rank in range(ranks):
        source = counting_source(lengths)
        rank_batch(everything(Corpus(source, 50).train), layouts, rank)
        own = [
            (int(document), position)
            for layout in layouts
            for document, start, stop in zip(*(layout.q.on_rank(rank).columns()[:3]), strict=True)
            for position in range(start, min(stop + 1, lengths[document]))
        ]
        assert sorted(source.reads.elements()) == sorted(own)


def test_chunks_interleave_ping_and_pong(counting_source):
    """One document of 8 rows on one rank, two tensor-parallel ranks: each chunk holds half of ping and half of pong."""
    documents = Corpus(counting_source([8]), 8).train
    layouts = lay_out([8], 1, nano_batches=2)
    batch = rank_batch(everything(documents), layouts, 0, align=2, chunks=2)
    assert batch.nano_rows == (4, 4)
    assert batch.positions.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert batch.tokens.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert batch.labels.tolist() == [1, 2, 5, 6, 3, 4, 7, 0]
    assert batch.loss_mask.tolist() == [True] * 7 + [False]


def test_a_rank_without_tokens_gets_padding_only(counting_source):
    documents = Corpus(counting_source([3]), 8).train
    layouts = lay_out([3], 2, nano_batches=2, rank_of=[0])
    batch = rank_batch(everything(documents), layouts, 1, align=4, chunks=2)
    assert batch.nano_rows == (4, 4)
    assert not batch.tokens.any()
    assert not batch.loss_mask.any()


def test_types(counting_source):
    documents = Corpus(counting_source([3]), 8).train
    batch = rank_batch(everything(documents), lay_out([3], 1), 0)
    assert [c.dtype for c in (batch.tokens, batch.labels, batch.positions)] == [np.int64] * 3
    assert batch.loss_mask.dtype == bool


def test_a_document_repeated_in_a_micro_batch_is_read_for_each(counting_source):
    documents = Corpus(counting_source([3, 4]), 8).train
    micro_batch = Sampler(documents.lengths, 1, 14, 1, 0).next()[0]
    assert sorted(micro_batch.documents.tolist()) == [0, 0, 1, 1]
    batch = rank_batch(documents.choose(micro_batch.documents), lay_out(micro_batch.lengths, 1), 0)
    assert sorted(batch.tokens.tolist()) == sorted([0, 1, 2] * 2 + [1000, 1001, 1002, 1003] * 2)


@pytest.mark.parametrize(("align", "chunks"), [(1, 2), (4, 3), (0, 1), (2, 0)])
def test_rows_that_cannot_be_shared_evenly_are_refused(counting_source, align, chunks):
    documents = Corpus(counting_source([3]), 8).train
    with pytest.raises(DataError, match="not a multiple"):
        rank_batch(everything(documents), lay_out([3], 1), 0, align=align, chunks=chunks)


@pytest.mark.parametrize("document", [np.ones(3), np.ones((3, 3), np.int64)])
def test_what_is_no_list_of_token_ids_is_refused(document: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"Document 0 gives (float64 of shape \(3,\)|int64 of shape \(3, 3\))"):
        rank_batch([document], lay_out([3], 1), 0)


def test_every_row_knows_the_length_of_its_document() -> None:
    documents = [np.arange(3), np.arange(7)]
    for rank in range(2):
        rows = rank_batch(documents, lay_out([3, 7], 2), rank, align=4)
        assert len(rows.lengths) == len(rows.tokens) == 8
        owned = [(3, position) for position in range(3)] + [(7, position) for position in range(7)]
        mine = owned[rank * 5 : rank * 5 + 5]
        assert list(zip(rows.lengths.tolist(), rows.positions.tolist(), strict=True)) == [*mine, (0, 0), (0, 0), (0, 0)]
