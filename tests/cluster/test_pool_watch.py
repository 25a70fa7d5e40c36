"""The thread that watches over a pool with servers without a model: who is gone, and what is broken off then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from distca.cluster import pool_watch
from distca.cluster.pool_store import PoolStore
from distca.cluster.pool_watch import PoolWatch
from distca.cluster.process import Process

HERE = Process.here()
ELSEWHERE = replace(HERE, space="another machine")  # of which nobody here sees whether it runs


QUIET_S = 2.0
"""Seconds without a sign of life: many times those that a thread may wait for a core where other tests run."""


class Transport:
    broken = False

    def break_off(self) -> None:
        self.broken = True


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PoolWatch]]:
    monkeypatch.setattr(pool_watch, "_PERIOD_S", 0.02)
    monkeypatch.setattr(pool_watch, "QUIET_S", QUIET_S)
    store, made = dist.HashStore(), []

    def make(me: Process | None = None) -> PoolWatch:
        made.append(PoolWatch(PoolStore(store), me))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def _broken(*transports: Transport, within: float = 60.0) -> bool:
    """Whether all break off within so many seconds."""
    until = time.monotonic() + within
    while time.monotonic() < until and not all(each.broken for each in transports):
        time.sleep(0.02)
    return all(each.broken for each in transports)


def test_all_break_off_when_a_server_gives_no_sign_of_life(watches: Callable[..., PoolWatch]) -> None:
    first, second, server = watches(), watches(), watches(ELSEWHERE)
    transports = Transport(), Transport(), Transport()
    first.begin(0, transports[0], [ELSEWHERE])
    second.begin(0, transports[1])
    server.begin(0, transports[2])
    assert not _broken(transports[0], within=1.5 * QUIET_S) and not first.is_gone(ELSEWHERE)
    server.stop()
    assert _broken(*transports[:2]) and first.is_gone(ELSEWHERE)
    again = Transport()
    first.begin(1, again)  # its servers are others'
    assert not _broken(again, within=1.5 * QUIET_S)


def test_a_silent_server_that_waits_outside_the_pool_is_gone_and_breaks_nothing_off(
    watches: Callable[..., PoolWatch],
) -> None:
    home, transport, waiting = watches(), Transport(), watches(ELSEWHERE)
    home.begin(0, transport, [HERE])
    watches(HERE)
    assert not home.is_gone(ELSEWHERE)
    assert not _broken(transport, within=1.5 * QUIET_S) and not home.is_gone(ELSEWHERE)
    waiting.stop()
    until = time.monotonic() + 60
    while not home.is_gone(ELSEWHERE) and time.monotonic() < until:
        time.sleep(0.02)
    assert home.is_gone(ELSEWHERE) and not transport.broken


def test_all_break_off_when_one_of_them_has(watches: Callable[..., PoolWatch]) -> None:
    transports = [Transport() for _ in range(3)]
    first, *others = (watches() for _ in transports)
    for watch, transport in zip((first, *others), transports, strict=True):
        watch.begin(3, transport)
    others[1].end()
    transports[0].broken = True
    assert _broken(*transports[:2])
    assert not transports[2].broken, "it watches over no pool any more"


def test_a_process_that_has_ended_is_gone_at_once(watches: Callable[..., PoolWatch]) -> None:
    ended = replace(HERE, started=HERE.started - 1)
    watch, transport = watches(), Transport()
    watch.begin(0, transport, [HERE, ended])
    assert watch.is_gone(ended) and not watch.is_gone(HERE) and _broken(transport)
