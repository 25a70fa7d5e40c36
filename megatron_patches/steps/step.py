"""Makes a step: plans one global batch, and brings this rank's part of the batch to its device.

A *row* is what a tensor holds for one token: its id and label in a batch, its hidden state in a layer, or its q, k and
v. The plan gives every row a data-parallel rank, which computes linear layers for it. With ``disaggregate`` it divides
core attention into tasks. Each task goes to a rank of any pipeline stage, or to a *server without a model*: a process
that computes attention only. A rank's *routes* list the rows that it sends and receives, and its tasks. Every rank
calls :func:`make_step` with the same documents, and computes the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

from distca.data.batch import RankBatch, rank_batch
from distca.device.host_to_device import Upload, uploading
from distca.errors import DataError
from distca.plan import PlanOptions, StepPlan
from distca.plan.phases import Phase
from distca.plan.step import StepBalance
from distca.plan.step_file import StepInputs
from distca.recurrent import Recurrence
from distca.runtime.device_routes import LayerRoutes, StepRoutes
from distca.runtime.recurrent_routes import RecurrentRoutes
from megatron_patches.ranks.remote_servers import RemoteServers
from megatron_patches.steps.batch_context import DisaggregatedMicroBatch
from megatron_patches.steps.device_batch import Batch, batch_on_device, packed_attention, packed_batches
from megatron_patches.steps.failed_plans import reporting_failure
from megatron_patches.steps.step_documents import StepDocuments


@dataclass(frozen=True)
class Step:
    """One global batch, ready to run.

    Attributes:
        documents: the documents, by micro-batch of the plan. The plan may move documents to other micro-batches.
        balance: each server's estimated seconds for one layer, with this plan and without balancing.
        routes: this rank's routes; None if the CAD's ``disaggregate`` is False.
        batches: this rank's rows of each micro-batch, on its device.
        planning_ms: milliseconds from the beginning of planning until attention's routes were made.
        waited_ms: milliseconds that the training loop waited for the step.
        vocabulary: all token ids of this rank are below this number; None if ids were not checked.
        announced: the step's number in messages to servers without a model; 0 without such servers, and on ranks other
            than 0.
        generation: number of the generation of servers without a model for which the step was planned
            (``server_members.py``); 0 without such servers.
        queued: ``CAD.forward_backward`` calls it when the step's last kernel is queued. ``CAD.plan_ahead`` then begins
            to plan the next step. Without this call, planning begins when the loop asks for the next step.
    """

    documents: StepDocuments
    plan: StepPlan
    balance: StepBalance
    routes: StepRoutes | None
    batches: tuple[Batch, ...]
    planning_ms: float
    waited_ms: float = 0.0
    vocabulary: int | None = None
    announced: int = 0
    generation: int = 0
    queued: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Taker:
    """The rank for which a step is made, and what its model needs.

    Attributes:
        rank: the rank's number among data-parallel ranks.
        lengths: whether the model's position embedding needs the length of every row's document.
        vocabulary: token ids have to be below this number; None leaves ids unchecked.
        recurrences: for each layer of the model with attention or a recurrence, its recurrence or None. Empty if no
            layer has a recurrence.
    """

    stage: int
    rank: int
    device: torch.device | str
    lengths: bool = False
    vocabulary: int | None = None
    recurrences: Sequence[Recurrence | None] = ()


def make_step(
    documents: StepDocuments,
    options: PlanOptions,
    taker: Taker,
    *,
    room: int = 0,
    number: int = 1,
    folder: Path = Path(),
    remote: RemoteServers | None = None,
) -> Step:
    """Plans a step, and brings the routes and rows of rank ``taker.rank`` to ``taker.device``.

    Args:
        room: the most tokens of a micro-batch, over all ranks. Within this limit the planner may move documents between
            micro-batches, unless ``documents.homes`` gives documents their ranks. 0 leaves documents where they are.
        number: the step's number, for messages.
        folder: where a file with the planner's inputs is written if the planner fails.
        remote: the servers without a model, which compute the plan too; None without such servers.

    Raises:
        FailedPlanError: the planner failed with an unexpected error.
        PlanError: documents cannot be laid out over ranks; a document spans ranks while ``options.disaggregate`` is
            False; or a server without a model could not plan, or computed a different plan.
        LaunchError: a server without a model does not answer, and the run cannot go on without it.
        DataError: a document on this rank has a token id that is no whole number from 0 to ``taker.vocabulary`` - 1.
    """
    began = time.perf_counter()
    document_lengths = [[len(document) for document in documents_of] for documents_of in documents.micro_batches]
    homes = documents.homes if any(home is not None for home in documents.homes or ()) else None
    count = len(document_lengths)
    rooms = [room] * count if room and homes is None and count > 1 else None
    inputs = StepInputs(document_lengths, options, homes, rooms)
    announced, generation = (0, 0) if remote is None else (remote.announce(inputs), remote.generation)
    with reporting_failure(inputs, number, folder):
        plan = inputs.plan()
    if remote is not None:
        remote.agree(announced, plan)
    documents = _as_drawn(documents, plan.drawn)
    with uploading(taker.device) as upload:
        routes = StepRoutes.of(plan, taker.stage, taker.rank, upload) if options.disaggregate else None
        planning_ms = (time.perf_counter() - began) * 1e3
        rows = _rows_of_rank(documents, plan, taker)
        if routes is not None and taker.recurrences:
            routes = _with_pieces(routes, plan, taker, upload)
        if routes is None:
            batches = _packed(rows, plan, taker, upload)
        else:
            batches = _disaggregated(rows, routes, options.shares, taker, upload)
    with reporting_failure(inputs, number, folder):
        balance = plan.balance()
    return Step(
        documents,
        plan,
        balance,
        routes,
        batches,
        planning_ms,
        vocabulary=taker.vocabulary,
        announced=announced,
        generation=generation,
    )


def _rows_of_rank(documents: StepDocuments, plan: StepPlan, taker: Taker) -> list[RankBatch]:
    options, weights = plan.options, documents.weights or repeat(None, len(plan.layouts))
    rows = [
        rank_batch(of_batch, layouts, taker.rank, align=options.align, chunks=options.shares, weights=of_documents)
        for of_batch, layouts, of_documents in zip(documents.micro_batches, plan.layouts, weights, strict=True)
    ]
    if taker.vocabulary is not None:
        _check_ids(rows, taker.vocabulary, plan.drawn)
    return rows


def _packed(rows: Sequence[RankBatch], plan: StepPlan, taker: Taker, upload: Upload) -> tuple[Batch, ...]:
    attention = []
    for layouts in plan.layouts:
        documents = packed_attention(layouts[0], taker.rank, upload)
        pieces = {size: RecurrentRoutes.of(layouts, taker.rank, size, upload)[0] for size in _halos(taker.recurrences)}
        attention.append(replace(documents, recurrent=pieces))
    return packed_batches(rows, attention, plan.options, upload, lengths=taker.lengths)


def _disaggregated(
    rows: Sequence[RankBatch], routes: StepRoutes, chunks: int, taker: Taker, upload: Upload
) -> tuple[Batch, ...]:
    attention = [
        DisaggregatedMicroBatch(own, each.nano_rows, chunks) for each, own in zip(rows, routes.own, strict=True)
    ]
    return tuple(batch_on_device(upload, *each, lengths=taker.lengths) for each in zip(rows, attention, strict=True))


def _with_pieces(of_attention: StepRoutes, plan: StepPlan, taker: Taker, upload: Upload) -> StepRoutes:
    """Returns the routes of this stage's layers in order: the given routes, and new ones for recurrent layers.

    A piece is a run of a document's rows on one rank, in one nano-batch. Routes of a recurrent layer move summaries of
    a document's pieces to ranks with later pieces, which compute recurrent states from them (``chains.py``). They also
    move the ``halo_rows`` rows before a piece, for its convolution.
    """
    options = plan.options
    stage, recurrences = taker.stage, taker.recurrences
    # All stages have the same sequence of attention and recurrences, so the first one's holds for this stage.
    here, me = recurrences[: len(recurrences) // options.stages], options.pool_rank(stage, taker.rank)

    def pieces(phase: Phase) -> dict[int, tuple[RecurrentRoutes, ...]]:
        # Servers without a model take no part in recurrent layers.
        layouts = [each.layout.of_first(options.homes) for each in phase.plans]
        return {size: RecurrentRoutes.of(layouts, me, size, upload) for size in _halos(here)}

    def merged(
        attention: Sequence[LayerRoutes], by_size: Mapping[int, tuple[RecurrentRoutes, ...]]
    ) -> tuple[LayerRoutes, ...]:
        rest = iter(attention)  # one entry for each layer with attention
        return tuple(next(rest) if each is None else by_size[each.halo_rows] for each in here)

    def own(micro_batch: int, attention: Sequence[LayerRoutes]) -> tuple[LayerRoutes, ...]:
        there = pieces(plan.forward[plan.forward_phase(micro_batch, stage)])
        # Backward has routes of its own: other stages then run other micro-batches than during this forward.
        if options.stages > 1:
            back = pieces(plan.backward[plan.backward_phase(micro_batch, stage)])
            there = {
                size: tuple(one.with_backward(other) for one, other in zip(nanos, back[size], strict=True))
                for size, nanos in there.items()
            }
        return merged(attention, there)

    def served(
        attention: Sequence[tuple[LayerRoutes, ...] | None], phases: Sequence[Phase]
    ) -> tuple[tuple[LayerRoutes, ...] | None, ...]:
        pairs = zip(attention, phases, strict=True)
        return tuple(None if each is None else merged(each, pieces(phase)) for each, phase in pairs)

    return StepRoutes(
        tuple(own(*each) for each in enumerate(of_attention.own)),
        served(of_attention.served_forward, plan.forward),
        served(of_attention.served_backward, plan.backward),
    )


def _halos(recurrences: Sequence[Recurrence | None]) -> set[int]:
    """Returns the layers' ``halo_rows``: how many rows before a row the layer's causal convolution reads."""
    return {each.halo_rows for each in recurrences if each is not None}


def _check_ids(batches: Sequence[RankBatch], vocabulary: int, drawn: Sequence[np.ndarray]) -> None:
    """Refuses token ids that the model does not have: an embedding split over ranks would return zeros for them.

    ``drawn[m][d]`` says where the caller gave document d of the plan's micro-batch m: the number of the caller's
    micro-batch and the place in it, both from 0.
    """
    for batch, origin in zip(batches, drawn, strict=True):
        wrong = np.flatnonzero((batch.tokens < 0) | (batch.tokens >= vocabulary))
        if len(wrong):
            micro_batch, place = origin[batch.documents[wrong[0]]]
            raise DataError(
                f"Document {place} of micro-batch {micro_batch} has token {batch.tokens[wrong[0]]}, but the "
                f"model has ids 0 to {vocabulary - 1}: correct the data, or build the model with more token ids."
            )


def _as_drawn(documents: StepDocuments, drawn: Sequence[np.ndarray]) -> StepDocuments:
    """Returns the documents and weights, by micro-batch of the plan; ``drawn`` is that of :func:`_check_ids`."""
    given, weights = documents.micro_batches, documents.weights
    return replace(
        documents,
        micro_batches=[[given[m][d] for m, d in each.tolist()] for each in drawn],
        weights=weights and [np.array([weights[m][d] for m, d in each.tolist()], np.float32) for each in drawn],
    )
