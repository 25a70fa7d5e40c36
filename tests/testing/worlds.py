"""Worlds of ranks that several tests share, as starting them takes as long as a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distca.testing.ranks import RankFailure, World, loaded


class Worlds:
    """One world for each number of ranks, which is started when it is first called."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def call(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As :func:`distca.testing.ranks.run_ranks`; ``function`` leaves nothing behind that the next one would see."""
        world = self._worlds.get(ranks) or World(ranks)
        self._worlds[ranks] = world
        try:
            return [loaded(answer) for answer in world.call(function, *arguments)]
        except RankFailure:
            self._worlds.pop(ranks).end()
            raise

    def close(self) -> None:
        """Lets all ranks come to their end.

        Raises:
            RankFailure: a rank ended with an error.
        """
        try:
            for world in self._worlds.values():
                world.close()
        finally:
            for world in self._worlds.values():
                world.end()
