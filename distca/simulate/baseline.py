"""Steps of the other ways to train: whole documents at home, per-document context parallelism, ring and Ulysses.

Who holds which tokens is what ``distca.baselines`` says, as in the benchmarks. Array legend: R data-parallel ranks, D
documents, C ranks of a context-parallel group, P pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.baselines import BaselineError, Mode, Work, groups_of, pieces_of
from distca.baselines.layouts import Pieces, layout_of
from distca.baselines.mode import BY_HEADS, RINGS
from distca.data.sampler import MicroBatch
from distca.plan import CostModel, plan_at_home, traffic
from distca.simulate.experts import ExpertLayers
from distca.simulate.fabric import Exchange
from distca.simulate.heads import DealtCore, deal_core
from distca.simulate.job import Job
from distca.simulate.streams import Arrival, Streams

_CORE = -1  # in place of the number of a kind of attention, a recurrent layer


@dataclass(frozen=True)
class Block:
    """The part of a layer's attention that every rank computes before it waits again; [R] seconds each."""

    forward: np.ndarray
    backward: np.ndarray


@dataclass(frozen=True)
class Dealt:
    """A micro-batch as a mode deals it, with what a layer of some kind does. Array legend: R ranks.

    Attributes:
        rows: [R] rows of every rank.
        blocks: attention in order: one, or with ring one for every step.
        copies: [R] seconds of putting keys and values together, forward; backward takes twice that.
        read_rows: [R] key/value rows that are kept beside the rank's own.
        gather: [R] seconds of an all-gather of keys and values; 0 without.
        gathered: [R] bytes that a rank sends in it.
        halo: exchange of keys and values in place of a gather: of the rows before a rank's own that windows see.
        before: exchange before attention; backward has it behind attention.
        behind: exchange behind attention; backward has it before attention.
        hop: of a ring, keys and values to the next rank.
    """

    rows: np.ndarray
    blocks: tuple[Block, ...]
    copies: np.ndarray
    read_rows: np.ndarray
    gather: np.ndarray
    gathered: np.ndarray
    halo: Exchange
    before: Exchange
    behind: Exchange
    hop: Exchange

    @property
    def attention(self) -> np.ndarray:
        """[R] seconds of core attention of a layer, forward and backward."""
        seconds: np.ndarray = np.sum([block.forward + block.backward for block in self.blocks], axis=0)
        return seconds


def work_of(job: Job) -> Work:
    """Returns the cost of documents by which they are dealt to groups. The benchmarks measure it likewise: by one long
    document's pairs, or its tokens in layers with a window."""
    length = min(job.tokens_per_rank, 65_536)
    per_pair = per_token = 0.0
    for kind in job.model.attention_kinds:
        cost = job.costs[job.kinds.index(kind)]
        both = float(cost.per_direction("both", np.array([length]), np.array([length])).sum())
        if kind.window:
            per_token += both / length
        else:
            per_pair += both / (length * (length + 1) / 2)
    head = job.model.hidden * job.model.vocabulary
    layer, output = ((rate.forward + rate.backward) / job.tp for rate in (job.linear, job.output))
    if any(job.recurrent):
        per_token += len(job.model.recurrent_layers) * (job.core.whole_forward + job.core.whole_backward)
    return Work(layer * job.model.matmul_weights + output * head + per_token, per_pair)


def deal_micro_batch(
    job: Job, mode: Mode, micro_batch: MicroBatch, bins: int, halos: bool = False
) -> tuple[Dealt, ...]:
    """Deal and price one micro-batch: by kind of attention.

    Args:
        job: what runs.
        mode: a baseline.
        micro_batch: its documents.
        bins: that the sampler packed.
        halos: whether context parallelism sends layers with a window only the rows that they see.

    Raises:
        BaselineError: a document does not fit into a rank or a group of this mode, or windows not into the mode.
    """
    if mode.method in RINGS and any(kind.window for kind in job.kinds):
        raise BaselineError(f"{mode.name} has no layers with windows; choose another mode.")
    ranks, lengths = job.data_parallel, micro_batch.lengths
    assert micro_batch.rank_of is not None
    group_of = groups_of(mode, lengths, micro_batch.rank_of, bins, ranks, job.tokens_per_rank, work_of(job))
    pieces = pieces_of(mode, lengths, group_of)
    rows = np.bincount(pieces.rank, pieces.rows, ranks)
    nothing, none = np.zeros(ranks), job.stage_fabric.exchange(*np.zeros((3, 0), np.int64))

    def of_kind(window: int, cost: CostModel) -> Dealt:
        sends_halos = window > 0 and (halos or mode.method == "cp-halo")
        alone = Dealt(rows, (_block(job, cost, pieces),), nothing, nothing, nothing, nothing, none, none, none, none)
        if mode.method in ("cp", "cp-keep", "cp-halo"):
            read = pieces.rows + np.minimum(pieces.start, window - 1) if window else pieces.stop
            gathering = _gathering(job, mode.degree, alone, read=np.bincount(pieces.rank, read, ranks))
            return _with_halos(job, gathering, pieces, lengths, window) if sends_halos else gathering
        if mode.method in BY_HEADS:
            return _exchanging(
                job, mode.degree, replace(alone, blocks=(_by_heads(job, cost, mode, lengths, group_of),))
            )
        if mode.method in RINGS:
            blocks = _ring_blocks(job, mode.degree, pieces, len(lengths))
            return _in_a_ring(job, mode.degree, replace(alone, blocks=blocks))
        return alone

    return tuple(of_kind(kind.window, cost) for kind, cost in zip(job.kinds, job.costs, strict=True))


def _with_halos(job: Job, gathering: Dealt, pieces: Pieces, lengths: np.ndarray, window: int) -> Dealt:
    """Layers with a window exchange the rows before every piece that its rank does not have, each once."""
    home = plan_at_home(layout_of(pieces, lengths, job.data_parallel))
    rows = traffic(replace(home, windows=(window,))).kv
    size = rows.rows * job.shape.kv_bytes
    return replace(
        gathering,
        gather=np.zeros(job.data_parallel),
        gathered=np.zeros(job.data_parallel),
        halo=job.stage_fabric.exchange(rows.home, rows.server, size),
        behind=job.stage_fabric.exchange(rows.server, rows.home, size),
    )


def _gathering(job: Job, degree: int, alone: Dealt, read: np.ndarray) -> Dealt:
    """Context parallelism: every rank of a group gets all keys and values, and reads ``read`` [R] rows of them."""
    fabric, shape = job.stage_fabric, job.shape
    most = _of_the_fullest(alone.rows, degree)
    rate, latency = fabric.ring(degree)
    size = most * (degree - 1) * shape.kv_bytes
    return replace(
        alone,
        copies=job.copied(2 * read * shape.kv_bytes),
        read_rows=read,
        gather=np.where(size > 0, size / rate + latency, 0.0),
        gathered=size,
        behind=fabric.everyone(degree, most * shape.kv_bytes),
    )


def _exchanging(job: Job, degree: int, alone: Dealt) -> Dealt:
    """Ulysses: rows go to the ranks of their heads before attention, and come back behind it."""
    rows, shape, fabric = alone.rows, job.shape, job.stage_fabric
    return replace(
        alone,
        copies=job.copied(2 * rows * (shape.q_bytes + shape.kv_bytes)),
        before=fabric.everyone(degree, rows * (shape.q_bytes + shape.kv_bytes) / degree),
        behind=fabric.everyone(degree, rows * shape.o_bytes / degree),
    )


def _in_a_ring(job: Job, degree: int, alone: Dealt) -> Dealt:
    """Keys and values go from rank to rank of a group."""
    ranks, shape = np.arange(job.data_parallel), job.shape
    first = ranks // degree * degree
    following = first + (ranks - first + 1) % degree
    size = _of_the_fullest(alone.rows, degree) * shape.kv_bytes
    return replace(
        alone,
        copies=job.copied(3 * degree * alone.rows * shape.o_bytes),
        hop=job.stage_fabric.exchange(ranks, following, size),
    )


def _of_the_fullest(rows: np.ndarray, degree: int) -> np.ndarray:
    """[R] rows of the fullest rank of every rank's group."""
    return np.repeat(rows.reshape(-1, degree).max(axis=1), degree)


def _block(job: Job, cost: CostModel, pieces: Pieces) -> Block:
    seconds = cost.per_direction("both", pieces.rows, pieces.stop) * job.rates.attention_factor
    return Block(*(np.bincount(pieces.rank, each, job.data_parallel) for each in seconds))


def _by_heads(job: Job, cost: CostModel, mode: Mode, lengths: np.ndarray, group_of: np.ndarray) -> Block:
    """Ulysses: every rank computes all rows of its group's documents, of its share of the heads."""
    seconds = cost.per_direction("both", lengths, lengths) * job.rates.attention_factor / mode.degree
    groups = job.data_parallel // mode.degree
    return Block(*(np.repeat(np.bincount(group_of, each, groups), mode.degree) for each in seconds))


def _ring_blocks(job: Job, degree: int, pieces: Pieces, documents: int) -> tuple[Block, ...]:
    """A ring: own rows first, then with the block of every rank before this one in it, one step each. The late rows of
    a rank see both chunks of one that comes after it, all its rows the early chunk of one before."""
    ranks = job.data_parallel
    key = pieces.document * ranks + pieces.rank
    early, late = (
        np.bincount(key, pieces.rows * chosen, documents * ranks).reshape(documents, ranks)
        for chosen in (~pieces.late, pieces.late)
    )
    own, place = early + late, np.arange(ranks) % degree
    blocks = [_priced(job, own, own * 0)]
    for step in range(1, degree):
        source = np.arange(ranks) - place + (place - step) % degree
        before = place[source] < place
        q = np.where(before, own, late)
        kv = np.where(before, early[:, source], own[:, source])
        blocks.append(_priced(job, q * (kv > 0), kv))
    return tuple(blocks)


def _priced(job: Job, q: np.ndarray, kv: np.ndarray) -> Block:
    """[D, R] query rows that see ``kv`` rows all and, where there are none, themselves causally."""
    document, rank = np.nonzero(q)
    q, kv = q[document, rank], kv[document, rank]
    # A causal range of q rows behind kv others has these pairs and q²/2 more.
    share = np.where(kv > 0, kv / np.maximum(kv + q / 2, 1), 1.0)
    seconds = job.cost.per_direction("both", q, q + kv) * share * job.rates.attention_factor
    return Block(*(np.bincount(rank, each, job.data_parallel) for each in seconds))


class BaselineLayers:
    """Runs the layers of a stage on one micro-batch, which is dealt by kind of attention.

    Args:
        job: what runs.
        mode: a baseline.
        hidden: gathers and exchanges travel beside the rest of a layer, and only what is longer is waited for.
        streams: of a stage's data-parallel ranks.
        stage: whose layers.

    Attributes:
        attention: [R] seconds of core attention so far.
    """

    def __init__(self, job: Job, mode: Mode, streams: Streams, hidden: bool = False, stage: int = 0) -> None:
        self._job, self._mode, self._streams, self._hidden = job, mode, streams, hidden
        self._late: list[Arrival] = []
        kinds = iter(job.layer_kinds[stage])
        self._kinds = [_CORE if recurrent else next(kinds) for recurrent in job.recurrent]
        self._experts = ExpertLayers(
            replace(job, hide_experts=False), streams, np.full(job.data_parallel, stage), hidden
        )
        self.attention = np.zeros(job.data_parallel)

    def forward(self, dealt: tuple[Dealt, ...], rows: np.ndarray) -> None:
        """All layers; ``rows`` [R] may hold padding that linear layers compute too."""
        mixers = self._mixers(dealt)
        for layer, kind in enumerate(self._kinds):
            each = self._job.rows[layer]
            self._compute(rows * each.pre_forward, "pre", layer, "forward")
            self._mix_forward(mixers[kind], layer)
            rotation = 0.0 if kind == _CORE else self._job.rotation / 3
            self._compute(rows * (each.post_forward + rotation), "post", layer, "forward")
            self._run_experts(rows, layer, "forward")
            self._catch_up(layer)

    def backward(self, dealt: tuple[Dealt, ...], rows: np.ndarray) -> None:
        mixers = self._mixers(dealt)
        for layer, kind in reversed(list(enumerate(self._kinds))):
            each, mixer = self._job.rows[layer], mixers[kind]
            if self._job.recompute == "all":
                # Megatron computes a layer again as a whole, core attention and what it sends too.
                self._mix_forward(mixer, layer)
            self._run_experts(rows, layer, "backward")
            rotation = 0.0 if kind == _CORE else self._job.rotation * 2 / 3
            self._compute(rows * (each.post_backward + rotation), "post", layer, "backward")
            if isinstance(mixer, Dealt):
                self._attend_backward(mixer, layer)
            else:
                self._recur(mixer.back, mixer.backward, mixer.there, layer, "backward")
            self._compute(rows * each.pre_backward, "pre", layer, "backward")
            self._catch_up(layer)

    def _mixers(self, dealt: tuple[Dealt, ...]) -> dict[int, Dealt | DealtCore]:
        mixers: dict[int, Dealt | DealtCore] = dict(enumerate(dealt))
        if _CORE in self._kinds:
            mixers[_CORE] = deal_core(self._job, self._mode.degree, dealt[0].rows)
        return mixers

    def _mix_forward(self, mixer: Dealt | DealtCore, layer: int) -> None:
        if isinstance(mixer, Dealt):
            self._attend_forward(mixer, layer)
        else:
            self._recur(mixer.there, mixer.forward, mixer.back, layer, "forward")

    def _recur(self, first: Exchange, seconds: np.ndarray, second: Exchange, layer: int, direction: str) -> None:
        self._exchange(first, "heads there", layer, direction)
        self._compute(seconds, "core", layer, direction)
        self._exchange(second, "heads back", layer, direction)

    def _run_experts(self, rows: np.ndarray, layer: int, direction: str) -> None:
        def nothing(nano: int) -> None:
            pass

        if layer in self._experts:
            self._late += self._experts.run([rows], [0], layer, direction, nothing, nothing)

    def _attend_forward(self, dealt: Dealt, layer: int) -> None:
        self._gather(dealt, layer, "forward")
        self._exchange(dealt.before, "q,k,v", layer, "forward")
        for number, block in enumerate(dealt.blocks):
            last = number + 1 == len(dealt.blocks)
            hop = None if last else self._streams.launch(dealt.hop, "hop", layer, 0, "forward")
            copies = dealt.copies / len(dealt.blocks)
            self._compute(copies + block.forward, "attention", layer, "forward")
            self.attention += block.forward
            if hop is not None:
                self._streams.join(hop, layer, 0, "forward")
        if self._mode.method in BY_HEADS:
            self._exchange(dealt.behind, "o", layer, "forward")

    def _attend_backward(self, dealt: Dealt, layer: int) -> None:
        if self._mode.method == "cp":
            self._gather(dealt, layer, "backward")
        if self._mode.method in BY_HEADS:
            self._exchange(dealt.behind, "dO", layer, "backward")
        for number, block in enumerate(dealt.blocks):
            last = number + 1 == len(dealt.blocks)
            # Keys and values, and in float32 the gradients of those before, which go on to their home.
            count = (2 if last else 3) if dealt.hop.travels else 0
            hops = [self._streams.launch(dealt.hop, "hop", layer, 0, "backward") for _ in range(count)]
            copies = 2 * dealt.copies / len(dealt.blocks)
            self._compute(copies + block.backward, "attention", layer, "backward")
            self.attention += block.backward
            for hop in hops:
                self._streams.join(hop, layer, 0, "backward")
        if self._mode.method in ("cp", "cp-keep", "cp-halo"):
            self._exchange(dealt.behind, "dk,dv", layer, "backward")
        self._exchange(dealt.before, "dq,dk,dv", layer, "backward")

    def _gather(self, dealt: Dealt, layer: int, direction: str) -> None:
        self._exchange(dealt.halo, "k,v", layer, direction)
        if not dealt.gather.any():
            return
        arrival = self._streams.collective(dealt.gather, dealt.gathered, self._mode.degree, "gather k,v", layer)
        if self._hidden:
            self._late.append(arrival)
        else:
            self._streams.join(arrival, layer)

    def _exchange(self, exchange: Exchange, what: str, layer: int, direction: str) -> None:
        if not exchange.travels:
            return
        arrival = self._streams.launch(exchange, what, layer, 0, direction)
        if self._hidden:
            self._late.append(arrival)
        else:
            self._streams.join(arrival, layer, 0, direction)

    def _catch_up(self, layer: int) -> None:
        late, self._late = self._late, []
        for arrival in late:
            self._streams.join(arrival, layer)

    def _compute(self, seconds: np.ndarray, name: str, layer: int, direction: str) -> None:
        self._streams.compute(seconds, name, layer, 0, direction)
