"""Pieces, halo and states of recurrent layers, by brute force over documents: every rank's part is carried out in
numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.plan import Layout, RowExchange, Shards, lay_out
from distca.plan.recurrent.pieces import DocumentPieces
from distca.plan.recurrent.routes import PieceRoute, piece_routes
from tests.plan.cases import each, layouts
from tests.plan.recurrent.cases import cut_anywhere, random_cuts


def routes_of(placed: tuple[Layout, ...], width: int) -> list[tuple[PieceRoute, ...]]:
    return [piece_routes(placed, rank, width) for rank in range(placed[0].ranks)]


def tokens_of(layout: Layout) -> list[list[tuple[int, int]]]:
    """By rank, (document, position) of every row."""
    rows = [[(-1, -1)] * int(count) for count in layout.q_rows]
    for document, start, stop, rank, row in zip(*(x.tolist() for x in layout.q.columns()), strict=True):
        rows[rank][row : row + stop - start] = [(document, position) for position in range(start, stop)]
    return rows


def carried_out(exchanges: list[RowExchange], sources: list[list[object]]) -> list[list[object]]:
    """What arrives on every rank; each row arrives once, and senders and receivers agree."""
    arrived: list[list[object]] = [[None] * exchange.destination_rows for exchange in exchanges]
    sent = [
        (sender, peer, source, destination, rows)
        for sender, exchange in enumerate(exchanges)
        for peer, source, destination, rows in each(exchange.send)
    ]
    received = [
        (peer, server, source, destination, rows)
        for server, exchange in enumerate(exchanges)
        for peer, source, destination, rows in each(exchange.receive)
    ]
    assert sorted(sent) == sorted(received)
    kept = [(me, me, *rest) for me, exchange in enumerate(exchanges) for _, *rest in each(exchange.keep)]
    for sender, server, source, destination, rows in received + kept:
        assert len(sources[sender]) == exchanges[sender].source_rows
        assert arrived[server][destination : destination + rows] == [None] * rows, "a row came twice"
        arrived[server][destination : destination + rows] = sources[sender][source : source + rows]
    assert all(row is not None for rows in arrived for row in rows), "a row never came"
    assert len({exchange.travelling for exchange in exchanges}) == 1
    assert exchanges[0].travelling == sum(exchange.receive.total for exchange in exchanges)
    return arrived


@dataclass(frozen=True)
class Piece:
    half: int
    rank: int
    document: int
    start: int
    stop: int


def pieces_of(placed: tuple[Layout, ...], routes: list[tuple[PieceRoute, ...]]) -> list[list[list[Piece]]]:
    """By rank and half, its pieces as its route tells them."""
    found = []
    for rank, halves in enumerate(routes):
        found.append([])
        for half, route in enumerate(halves):
            rows = tokens_of(placed[half])[rank]
            mine = []
            for begin, end in route.spans:
                document, start = rows[begin]
                assert rows[begin:end] == [(document, start + n) for n in range(end - begin)]
                mine.append(Piece(half, rank, document, start, start + end - begin))
            assert sum(end - begin for begin, end in route.spans) == len(rows), "padding or a lost row"
            found[-1].append(mine)
    return found


def check(placed: tuple[Layout, ...], width: int) -> None:
    routes = routes_of(placed, width)
    pieces = pieces_of(placed, routes)
    check_halo(placed, width, routes, pieces)
    check_chains(routes, pieces, backward=False)
    check_chains(routes, pieces, backward=True)


def check_halo(
    placed: tuple[Layout, ...],
    width: int,
    routes: list[tuple[PieceRoute, ...]],
    pieces: list[list[list[Piece]]],
) -> None:
    buffers: list[list[object]] = [[] for _ in routes]
    for half in range(len(placed)):
        tokens = tokens_of(placed[half])
        given = [[tokens[rank][row] for row in parts[half].halo.given] for rank, parts in enumerate(routes)]
        assert all(len(set(rows)) == len(rows) for rows in given)
        for rank, arrived in enumerate(carried_out([parts[half].halo.exchange for parts in routes], given)):
            buffers[rank] += arrived
            assert len(set(arrived)) == len(arrived), "a row travels twice to one rank"
        for rank, parts in enumerate(routes):
            continuing = [piece for piece in pieces[rank][half] if piece.start]
            assert len(parts[half].halo.picked) == len(continuing)
            for piece, picked in zip(continuing, parts[half].halo.picked.tolist(), strict=True):
                wanted = [(piece.document, piece.start - width + n) for n in range(width)]
                assert [None if at < 0 else buffers[rank][at] for at in picked] == [
                    row if row[1] >= 0 else None for row in wanted
                ]


def check_chains(routes: list[tuple[PieceRoute, ...]], pieces: list[list[list[Piece]]], backward: bool) -> None:
    """Every piece with others before it finds their summaries in order, each with a transition but the first's."""
    way = -1 if backward else 1
    documents: dict[int, list[Piece]] = {}
    for piece in sorted((p for halves in pieces for some in halves for p in some), key=lambda p: way * p.start):
        documents.setdefault(piece.document, []).append(piece)
    passed: list[dict[int, list[tuple[Piece, bool]]]] = [{} for _ in routes]
    reached: dict[Piece, list[tuple[Piece, bool]]] = {}
    for half in range(len(routes[0]))[::way]:
        chains = [(parts[half].backward if backward else parts[half].forward) for parts in routes]
        arrived = []
        for sends, exchange in (("sends_state", "states"), ("sends_transition", "transitions")):
            sources: list[list[object]] = [
                [pieces[rank][half][number] for number in getattr(chain, sends)] for rank, chain in enumerate(chains)
            ]
            arrived.append(carried_out([getattr(chain, exchange) for chain in chains], sources))
        for rank, chain in enumerate(chains):
            read = [0, 0]
            for document, links in chain.chains:
                so_far = passed[rank].setdefault(document, [])
                for link in links:
                    if link.piece >= 0:
                        reached[pieces[rank][half][link.piece]] = list(so_far)
                    if link.state >= 0:
                        piece = arrived[0][rank][link.state]
                        read[0] += 1
                        if link.transition >= 0:
                            assert arrived[1][rank][link.transition] == piece
                            read[1] += 1
                        so_far.append((piece, link.transition >= 0))
            assert read == [len(arrived[0][rank]), len(arrived[1][rank])], "what arrives is not read"
    for ordered in documents.values():
        for place, piece in enumerate(ordered):
            before = [(other, n > 0) for n, other in enumerate(ordered[:place])]
            assert reached.pop(piece, []) == before
    assert not reached


@pytest.mark.parametrize("seed", range(40))
def test_documents_cut_anywhere(seed: int) -> None:
    check(cut_anywhere(random_cuts(seed), 1 + seed % 5, seed), width=1 + seed % 4)


@settings(max_examples=25)
@given(layouts(), st.integers(1, 3))
def test_layouts_of_the_planner(placed: tuple[Layout, ...], width: int) -> None:
    check(placed, width)


def test_documents_on_one_rank_move_nothing() -> None:
    placed = lay_out([5, 40, 3, 9, 1], 4, rank_of=[0, 2, 0, 3, 2], nano_batches=2)
    assert any((~DocumentPieces.of(placed).opens).tolist()), "no document is in both halves"
    for parts in routes_of(placed, 3):
        for route in parts:
            exchanges = [route.halo.exchange]
            exchanges += [x for way in (route.forward, route.backward) for x in (way.states, way.transitions)]
            assert all(exchange.travelling == 0 for exchange in exchanges)


def test_a_document_of_two_pieces_sends_one_state_and_no_transition() -> None:
    (only,) = lay_out([8], 2)
    first, second = (parts[0] for parts in routes_of((only,), 3))
    assert (first.forward.states.send.total, first.forward.transitions.travelling) == (1, 0)
    assert (second.backward.states.send.total, second.backward.transitions.travelling) == (1, 0)
    assert first.backward.states.send.total == second.forward.states.send.total == 0


def test_shards_that_continue_each_other_are_one_piece() -> None:
    (only,) = lay_out([7], 1)
    cut = Shards(*(np.array(x) for x in ([0, 0], [0, 3], [3, 7], [0, 0], [0, 3])))
    (route,) = piece_routes((replace(only, q=cut),), 0, 3)
    assert route.spans == [(0, 7)] and route.opens.all() and route.closes.all()
    apart = replace(cut, row=np.array([4, 0]))
    (route,) = piece_routes((replace(only, q=apart),), 0, 3)
    assert route.spans == [(0, 4), (4, 7)] and route.opens.tolist() == [False, True]
