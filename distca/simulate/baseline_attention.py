"""The core attention of baselines: whole documents on a rank, context parallelism by document, a ring, and Ulysses.

Which rank holds which tokens comes from ``distca.baselines``, as in the benchmarks. There a document is cut into
pieces, each on one rank of a context-parallel group. Array legend: R data-parallel ranks, D documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.baselines import BaselineError, Mode, Work, groups_of, pieces_of
from distca.baselines.layouts import HomePieces, layout_of
from distca.baselines.mode import BY_HEADS, RINGS
from distca.data.sampler import MicroBatch
from distca.plan import CostModel, plan_at_home, traffic
from distca.simulate.fabric import Exchange
from distca.simulate.job import Job


@dataclass(frozen=True)
class Block:
    """A part of a layer's core attention between two waits.

    Attributes:
        forward: [R] seconds of the part in forward.
        backward: [R] seconds of the part in backward.
    """

    forward: np.ndarray
    backward: np.ndarray


@dataclass(frozen=True)
class DealtAttention:
    """A micro-batch in one mode, for layers of one kind of attention. Fields without a use are 0 or empty.

    Attributes:
        rows: [R] rows of each rank.
        blocks: the parts of core attention in order. A ring has one for each of its steps, other modes have one.
        copies: [R] seconds of copying keys and values for the kernel in forward; backward takes twice as long.
        read_rows: [R] key/value rows that the rank reads and has to hold.
        gather: [R] seconds of an all-gather of keys and values.
        gathered: [R] bytes that the rank sends in the all-gather.
        halo: the exchange in place of the all-gather in layers with a window, of the rows that the window sees.
        before: the exchange before core attention; in backward it comes after core attention.
        behind: with Ulysses the exchange after core attention, in backward before it. With context parallelism the
            exchange of gradients of keys and values after backward.
        hop: the exchange of a ring's step: keys and values go to the next rank.
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
        """[R] seconds of a layer's core attention, forward and backward together."""
        seconds: np.ndarray = np.sum([block.forward + block.backward for block in self.blocks], axis=0)
        return seconds


def work_of(job: Job) -> Work:
    """Returns the seconds per token and per query-key pair, by which modes deal documents to groups.

    Attention of a long document is priced: its seconds count per pair, or per token in layers with a window. The
    benchmarks measure it in the same way."""
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


def pieces_of_micro_batch(job: Job, mode: Mode, micro_batch: MicroBatch, bins: int) -> tuple[np.ndarray, HomePieces]:
    """Returns the group [D] of each document of a micro-batch, and the pieces into which the mode cuts documents.

    Raises:
        BaselineError: a document does not fit into a rank or a group of this mode.
    """
    lengths = micro_batch.lengths
    assert micro_batch.rank_of is not None
    group_of = groups_of(mode, lengths, micro_batch.rank_of, bins, job.data_parallel, job.tokens_per_rank, work_of(job))
    return group_of, pieces_of(mode, lengths, group_of)


def deal_micro_batch(
    job: Job, mode: Mode, micro_batch: MicroBatch, bins: int, halos: bool = False
) -> tuple[DealtAttention, ...]:
    """Deals a micro-batch to ranks as a mode does; returns the times of a layer for each kind of attention.

    Args:
        job: the model, the cluster and the parallelism.
        mode: a baseline.
        micro_batch: the documents.
        bins: the number of bins into which the sampler packed the documents.
        halos: True makes context parallelism send layers with a window only the keys and values that they see.

    Raises:
        BaselineError: a document does not fit into a rank or a group of this mode, or the mode has no windows.
    """
    if mode.method in RINGS and any(kind.window for kind in job.kinds):
        raise BaselineError(f"{mode.name} has no layers with windows; choose another mode.")
    ranks, lengths = job.data_parallel, micro_batch.lengths
    group_of, pieces = pieces_of_micro_batch(job, mode, micro_batch, bins)
    rows = np.bincount(pieces.rank, pieces.rows, ranks)
    nothing, none = np.zeros(ranks), job.stage_fabric.exchange(*np.zeros((3, 0), np.int64))

    def of_kind(window: int, cost: CostModel) -> DealtAttention:
        sends_halos = window > 0 and (halos or mode.method == "cp-halo")
        alone = DealtAttention(
            rows, (_block(job, cost, pieces),), nothing, nothing, nothing, nothing, none, none, none, none
        )
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


def _with_halos(
    job: Job, gathering: DealtAttention, pieces: HomePieces, lengths: np.ndarray, window: int
) -> DealtAttention:
    """Returns the micro-batch for layers with a window, in which ranks get only the rows that their windows see.

    Each row travels once to a rank. Gradients go back the same way."""
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


def _gathering(job: Job, degree: int, alone: DealtAttention, read: np.ndarray) -> DealtAttention:
    """Returns the micro-batch with context parallelism: each rank of a group of ``degree`` ranks gets all keys and
    values, and reads ``read`` [R] rows of them."""
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


def _exchanging(job: Job, degree: int, alone: DealtAttention) -> DealtAttention:
    """Returns the micro-batch with Ulysses: rows go to the ranks of their heads before attention and come back after
    it."""
    rows, shape, fabric = alone.rows, job.shape, job.stage_fabric
    return replace(
        alone,
        copies=job.copied(2 * rows * (shape.q_bytes + shape.kv_bytes)),
        before=fabric.everyone(degree, rows * (shape.q_bytes + shape.kv_bytes) / degree),
        behind=fabric.everyone(degree, rows * shape.o_bytes / degree),
    )


def _in_a_ring(job: Job, degree: int, alone: DealtAttention) -> DealtAttention:
    """Returns the micro-batch with a ring: keys and values go from rank to rank of a group."""
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
    """Returns for each rank [R] the most rows that a rank of its group has."""
    return np.repeat(rows.reshape(-1, degree).max(axis=1), degree)


def _block(job: Job, cost: CostModel, pieces: HomePieces) -> Block:
    """Returns core attention in one part: each rank computes its pieces' queries over all keys up to them."""
    seconds = cost.per_direction("both", pieces.rows, pieces.stop) * job.rates.attention_factor
    return Block(*(np.bincount(pieces.rank, each, job.data_parallel) for each in seconds))


def _by_heads(job: Job, cost: CostModel, mode: Mode, lengths: np.ndarray, group_of: np.ndarray) -> Block:
    """Returns core attention with Ulysses: each rank computes all rows of its group for its part of the heads."""
    seconds = cost.per_direction("both", lengths, lengths) * job.rates.attention_factor / mode.degree
    groups = job.data_parallel // mode.degree
    return Block(*(np.repeat(np.bincount(group_of, each, groups), mode.degree) for each in seconds))


def _ring_blocks(job: Job, degree: int, pieces: HomePieces, documents: int) -> tuple[Block, ...]:
    """Returns core attention of a ring, a part for each step.

    A rank of a ring holds an early and a late chunk of each document. With 2 ranks and chunks 0 to 3, rank 0 has chunks
    0 and 3, and rank 1 has chunks 1 and 2. In the first step a rank computes its own rows. In each further step it gets
    the keys and values of another rank. If that rank stands before it in the ring, all its queries see the other one's
    early chunk. Otherwise only its late chunk's queries see keys, and they see both chunks of the other.
    """
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
    """Returns the seconds of [D, R] query rows that all see ``kv`` [D, R] rows, or see themselves causally where ``kv``
    is 0."""
    document, rank = np.nonzero(q)
    q, kv = q[document, rank], kv[document, rank]
    # The cost model counts q · kv pairs and q²/2 causal ones. Only the first count here, so a part of it is taken.
    share = np.where(kv > 0, kv / np.maximum(kv + q / 2, 1), 1.0)
    seconds = job.cost.per_direction("both", q, q + kv) * share * job.rates.attention_factor
    return Block(*(np.bincount(rank, each, job.data_parallel) for each in seconds))
