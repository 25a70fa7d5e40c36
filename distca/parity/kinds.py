"""The matrix of models with several kinds of attention layers: every kind, mixes of kinds, and models that differ
outside core attention, in every layout of ranks. The suite has no time for it; ``distca parity --kinds true`` runs it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distca.parity.cases import ParityCase, ParityShape, Recompute
from distca.parity.variants import megatron_variants, option_variants
from distca.parity.worlds import OF_KINDS, World

WINDOW = 8
"""Keys that a query sees, its own included; a Megatron window excludes it."""


def matrix(world: World) -> list[ParityCase]:
    """Every model with every second set of documents, of which the next world has the others. Keep and resend,
    ping-pong, what is recomputed, host memory and random plans take turns; the variants follow."""
    turn = OF_KINDS.index(world)
    models, documents = _models(), _documents(world.data_parallel)
    cases = [
        _in_turn(world, (turn + row + column) // 2, lengths, config)
        for row, config in enumerate(models)
        for column, lengths in enumerate(documents)
        if (turn + row + column) % 2 == 0
    ]
    variants = [*megatron_variants(world.tp, world.pp), *option_variants(world.tp, world.pp)]
    return [*cases, *(replace(case, ranks_per_node=world.ranks_per_node) for case in variants)]


def _models() -> list[dict[str, Any]]:
    """Every kind by itself, and mixes of kinds, which stages have at the same depth in another order."""
    window, sinks = {"window_size": (WINDOW - 1, 0)}, {"softmax_type": "learnable"}
    first, alternate = {"window_attn_skip_freq": [1, 0, 0, 1]}, {"window_attn_skip_freq": 2}
    return [
        {},
        sinks,
        window,
        {**window, **sinks},
        {**window, **alternate},
        {**window, **sinks, **first},
        {**window, **sinks, "window_attn_skip_freq": [1, 1, 1, 0], "softmax_scale": 0.11, "qk_layernorm": True},
        {**sinks, **alternate, "window_size": (0, 0)},
        {**sinks, **first, "window_size": (39, 0)},
    ]


def _documents(ranks: int) -> list[tuple[tuple[int, ...], ...]]:
    """Lengths of documents by micro-batch. They are around the window, have shards around it, or have documents and
    shards shorter than it."""
    around = (WINDOW - 1, WINDOW, WINDOW + 1)
    return [
        ((*around, 1, 2 * WINDOW, 3 * WINDOW + 1), (50, 2)),
        tuple((ranks * rows,) for rows in around),
        tuple((2 * ranks * rows,) for rows in around),  # as many rows in each nano-batch of a rank
        ((13, 7, 1, 29, 3), (5, 6)),
        ((1, 1, 2, 1, 1),),
        ((2,), (1, 2)),  # most ranks have no tokens
    ]


def _in_turn(world: World, turn: int, lengths: tuple[tuple[int, ...], ...], config: dict[str, Any]) -> ParityCase:
    levels: tuple[Recompute, ...] = ("none", "all", "mlp")
    resend = world.pp > 1 or turn % 2 == 1
    return ParityCase(
        micro_batches=lengths,
        tp=world.tp,
        pp=world.pp,
        backward="resend" if resend else "keep",
        ping_pong=turn // 2 % 2 == 0,
        recompute=levels[turn % 3],
        offload=resend and world.pp == 1 and levels[turn % 3] == "all",
        scheduler="random" if world.pp == 1 and turn % 5 == 0 else "real",
        ranks_per_node=world.ranks_per_node,
        shape=ParityShape(layers=4),
        config=config,
    )
