"""The settings of a run of the throughput benchmark."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

from benchmarks.peers.served import check_served
from benchmarks.throughput.unused import CONTEXT
from distca.baselines.dealing import check_holds, ranks_of_document
from distca.baselines.mode import Mode, every_mode, parse_mode
from distca.data.mixes import Mix
from distca.errors import BaselineError, ConfigError
from distca.plan import AttentionKind
from distca.train.config.cli import parse_run_config
from distca.train.config.environment import settings_among
from distca.train.config.schema import MEASURE, RunConfig
from distca.train.config.validate import validate

# The same number of optimizer steps for every mode must leave the same weights up to rounding.
_LEARNING_RATE = 1e-5
_FULL_SHARE: dict[Mix, float] = {"pretrain": 0.0, "prolong": 0.3}


@dataclass(frozen=True)
class Cell:
    """One workload: a mix in its long-context version, and its longest document in tokens."""

    mix: Mix
    context: int

    @property
    def full_share(self) -> float:
        """Share of the long documents that are set to the full context."""
        return _FULL_SHARE[self.mix]

    @property
    def name(self) -> str:
        return f"{self.mix} {self.context // 1024}K" if self.context >= 1024 else f"{self.mix} {self.context}"

    def ranks_per_document(self, ranks: int, tokens_per_rank: int) -> int:
        """The fewest ranks that divide ``ranks`` and hold the longest document.

        Raises:
            ConfigError: all ranks together do not hold it.
        """
        size = ranks_of_document(self.context, ranks, tokens_per_rank)
        if size is not None:
            return size
        raise ConfigError(
            f"A document of {self.context:,} tokens does not fit into {ranks} data-parallel "
            f"rank{'s' if ranks > 1 else ''} of {tokens_per_rank:,} tokens; "
            "lower --contexts (CONTEXT_LENGTH) or raise data.tokens_per_rank (TOKENS_PER_RANK)."
        )


@dataclass(frozen=True)
class Settings:
    """A run.

    Attributes:
        output: folder for benchmark.json, the table and the plot.
        modes: ways to train.
        left_out: of all modes, the ones that these ranks cannot run, by name, and why.
        cells: workloads.
        batches: measured global batches.
        warm_up: global batches before them.
        traced: measured batches that are run once more under the profiler, for the idle share.
        link_channels: NCCL channels that every link is limited to; None for no limit.
        socket_nodes: so many ranks play a node, whose rows go to other nodes by NCCL over sockets; 0 for real nodes.
        short_warm_up: batches of the warm-up are their first micro-batch only.
        pairs: how often the best baseline and DistCA run once more, one after the other.
        seed: of the documents.
        config: model, parallelism, precision, recomputation, tokens per rank, micro-batches.
    """

    output: Path
    modes: tuple[Mode, ...]
    left_out: dict[str, str]
    cells: tuple[Cell, ...]
    batches: int
    warm_up: int
    traced: int
    link_channels: int | None
    seed: int
    config: RunConfig
    socket_nodes: int = 0
    short_warm_up: bool = False
    pairs: int = 0

    @property
    def peer(self) -> bool:
        """Whether this start is a peer's, which adds its mode to the file of the others."""
        return self.modes[0].peer

    @property
    def slow_links(self) -> bool:
        """Whether links are made slower than they are, which only NCCL's can be."""
        return self.link_channels is not None or self.socket_nodes > 0


def parse(argv: list[str], world_size: int, on_cpus: bool = False) -> Settings:
    """The run that a command line asks of ``world_size`` ranks; settings of model and parallelism follow ``--``.
    ``on_cpus`` says that they run on CPUs; otherwise that is not known.

    Raises:
        ConfigError: on settings that do not exist or cannot be.
    """
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    arguments = _parser().parse_args(own)
    if min(arguments.batches, *arguments.contexts) < 1 or min(arguments.warm_up, arguments.traced, arguments.pairs) < 0:
        raise ConfigError("--batches and --contexts are at least 1, --warm-up, --traced and --pairs at least 0.")
    channels = arguments.link_channels
    if channels is not None and (channels < 1 or channels & (channels - 1)):
        raise ConfigError(
            f"--link-channels is {channels}, but NCCL rounds the channels of sends and receives up to a power of two, "
            "and those of collectives not: give 1, 2, 4, ... so that all modes have the same."
        )
    config = parse_run_config(rest)
    if config.model.vocabulary < 1:
        raise ConfigError("model.vocabulary is 0, but random tokens need one; set it behind --.")
    _check_not_of_training(config)
    config = replace(config, output=str(arguments.output))
    if f"--{CONTEXT}" not in settings_among(rest):  # contexts are those of cells, which are checked below
        fits = min(config.data.context_length, max(config.data.tokens_per_rank, 2))
        config = replace(config, data=replace(config.data, context_length=fits))
    if arguments.socket_nodes:
        if arguments.socket_nodes < 0 or world_size % arguments.socket_nodes:
            raise ConfigError(
                f"--socket-nodes is {arguments.socket_nodes}, but nodes of so many ranks do not divide "
                f"{world_size} ranks; give a divisor of {world_size}."
            )
        config = replace(config, cad=replace(config.cad, ranks_per_node=arguments.socket_nodes))
    validate(config, world_size, config.model.vocabulary, on_cpus)
    cells = tuple(Cell(mix, context) for mix in arguments.mixes for context in arguments.contexts)
    for cell in cells:
        cell.ranks_per_document(config.parallel.data_parallel(world_size), config.data.tokens_per_rank)
    modes, left_out = _modes(arguments, config, world_size)
    _check_some_run(modes, cells, config.parallel.data_parallel(world_size), config.data.tokens_per_rank)
    steps = arguments.warm_up + arguments.batches + arguments.traced + 2
    optimizer = replace(config.optimizer, lr=_LEARNING_RATE, min_lr=_LEARNING_RATE, warmup_steps=0)
    return Settings(
        arguments.output,
        modes,
        left_out,
        cells,
        arguments.batches,
        arguments.warm_up,
        min(arguments.traced, arguments.batches),
        arguments.link_channels,
        config.data.seed,
        replace(config, optimizer=optimizer, train=replace(config.train, steps=steps)),
        arguments.socket_nodes,
        arguments.short_warm_up,
        arguments.pairs,
    )


def _modes(
    arguments: argparse.Namespace, config: RunConfig, world_size: int
) -> tuple[tuple[Mode, ...], dict[str, str]]:
    """The modes to run, and of all modes those that cannot be, with the reason."""
    ranks, kv_heads = config.parallel.data_parallel(world_size), config.model.kv_heads // config.parallel.tp
    key_heads = config.model.hybrid.key_heads // config.parallel.tp if config.model.recurrent_layers else 0
    fits = (ranks, kv_heads, kinds_of(config), key_heads, config.model.value_dim < config.model.resolved_head_dim)
    if arguments.modes != ["all"]:
        modes = tuple(parse_mode(name) for name in arguments.modes)
        for mode in modes:
            mode.check(*fits)
        _check_peers(modes, config)
        return modes, {}
    runnable, left_out = [], {}
    for mode in every_mode(ranks, any(config.model.windows)):
        if arguments.degree in (None, mode.degree) or mode.degree == 1:
            try:
                mode.check(*fits)
                runnable.append(mode)
            except BaselineError as error:
                left_out[mode.name] = str(error)
    return tuple(runnable), left_out


def _check_not_of_training(config: RunConfig) -> None:
    """Refuse what only pretrain_llama.sh does before and beside its ranks, also where a file names it."""
    if config.cad.servers:
        raise ConfigError(
            f"cad.servers is {config.cad.servers}, but the benchmark starts no servers without a model, and its ranks "
            "would wait for them; leave it out."
        )
    if config.cad.cost_table == MEASURE:
        raise ConfigError(
            f"cad.cost_table is {MEASURE}, but only training measures; give a file of `distca profile` or none."
        )


def _check_peers(modes: tuple[Mode, ...], config: RunConfig) -> None:
    """Refuse modes of unmodified Megatron-Core beside others, and what they are not built for."""
    peers = [mode for mode in modes if mode.peer]
    if not peers:
        return
    check_served(config)
    if len(modes) > 1:
        raise ConfigError(
            f"{peers[0].name} runs on Megatron-Core as it is, which other modes change in their process: start each "
            "such mode by itself, behind the others, with the same --output; it adds its figures to benchmark.json."
        )


def kinds_of(config: RunConfig) -> tuple[AttentionKind, ...]:
    """The kinds of the model's layers, each once, in the order of its layers."""
    return tuple(dict.fromkeys(config.model.attention_kinds))


def _check_some_run(modes: tuple[Mode, ...], cells: tuple[Cell, ...], ranks: int, room: int) -> None:
    """Refuse a run of which every mode would be skipped on every workload."""
    why: dict[str, None] = {}
    for cell, mode in product(cells, modes):
        try:
            check_holds(mode, ranks // cell.ranks_per_document(ranks, room), ranks, room)
        except BaselineError as error:
            why[str(error)] = None
        else:
            return
    raise ConfigError(" ".join(["No mode can run.", *why]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description="Train the same batches in several ways. Settings of pretrain_llama.py follow --.",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for benchmark.json, table.md, plot.png")
    parser.add_argument("--modes", nargs="+", default=["all"], help="all, or distca packed variable cp4 ring4 ...")
    parser.add_argument("--degree", type=int, help="with --modes all: this context-parallel degree only")
    parser.add_argument("--mixes", nargs="+", choices=get_args(Mix), default=list(get_args(Mix)))
    parser.add_argument("--contexts", nargs="+", type=int, default=[131_072], help="longest document, in tokens")
    parser.add_argument("--batches", type=int, default=30, help="measured global batches")
    parser.add_argument("--warm-up", type=int, default=3, help="global batches before them, not counted")
    parser.add_argument("--traced", type=int, default=2, help="batches run again under the profiler: idle share")
    parser.add_argument(
        "--link-channels",
        type=int,
        help="limit NCCL to so many channels, as a network would: 1, 2, 4, ...",
    )
    parser.add_argument(
        "--socket-nodes",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="RANKS",
        help="so many ranks of this machine, by default 1, play a node: NCCL reaches other nodes over sockets only",
    )
    parser.add_argument(
        "--pairs", type=int, default=0, help="run the best baseline and DistCA so often once more, one after the other"
    )
    parser.add_argument("--short-warm-up", action="store_true", help="warm up with one micro-batch of each batch")
    return parser
