"""A step that is ready to run: its plan, and this rank's routes and rows on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

from distca.attention import TaskBatch
from distca.data.batch import RankBatch, rank_batch
from distca.device.host_to_device import Upload, uploading
from distca.errors import DataError, PlanError
from distca.plan import Layout, PlanOptions, StepPlan
from distca.plan.phases import Phase
from distca.plan.step import StepBalance
from distca.plan.step_file import StepInputs
from distca.recurrent import Recurrence
from distca.runtime.device_routes import LayerRoutes, StepRoutes
from distca.runtime.recurrent_routes import RecurrentRoutes
from megatron_patches.ranks.remote_servers import RemoteServers
from megatron_patches.steps.batch_context import DisaggregatedMicroBatch, PackedMicroBatch
from megatron_patches.steps.failed_plans import reporting_failure
from megatron_patches.steps.step_documents import StepDocuments


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a micro-batch on its device, in the order in which the model takes them.

    Attributes:
        tokens: [1, rows] int64.
        labels: [1, rows] int64 next token of the same document.
        loss_mask: [1, rows] bool; false where there is no next token or it is not to be learned, and in padding. It is
            float32 weights where documents have some.
        positions: [1, rows] int64 position in the document.
        documents: [1, rows] int64 number of the document in the micro-batch; -1 in padding.
        attention: how core attention of these rows runs; the model takes it in place of the attention mask.
        micro_batch_lengths: [documents] int64 tokens of every document of the micro-batch, wherever it lives; on the
            host.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    attention: DisaggregatedMicroBatch | PackedMicroBatch
    micro_batch_lengths: np.ndarray


@dataclass(frozen=True)
class Step:
    """One global batch, ready to run.

    Attributes:
        documents: its documents, in the micro-batches into which the plan dealt them.
        plan: the plan of all ranks.
        balance: the balance that the plan achieves.
        routes: this rank's routes; None where attention stays at home.
        batches: this rank's rows, by micro-batch.
        planning_ms: milliseconds of planning and routing.
        waited_ms: milliseconds that the caller waited for the step.
        vocabulary: number of token ids that its documents were checked for; None where they were not.
        announced: the number by which servers without a model know the step; 0 without servers, and on ranks that do
            not tell them.
        generation: number of the pool's generation that it was planned for.
        queued: function to call when the step's work is queued on the device; from then on the next step is planned.
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
    """A rank that steps are made for, and what its model needs of them.

    Attributes:
        stage: the rank's pipeline stage.
        rank: its data-parallel rank.
        device: the device of its rows.
        lengths: whether the model's positions need the lengths of the rows' documents.
        vocabulary: number of the model's token ids; None checks none.
        recurrences: by layer, the recurrence of its core, None for attention; empty where all layers have attention.
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
    """Plans a step and brings a rank's routes and rows to its device, in one transfer.

    Args:
        documents: the step's documents.
        options: how to plan.
        taker: this rank.
        room: most tokens of a micro-batch; documents without homes are then dealt anew. 0 leaves them where they are.
        number: number of the step, for messages.
        folder: the folder in which the step is written if the planner fails on it.
        remote: the servers without a model, which plan it too; None for none.

    Raises:
        FailedPlanError: the planner failed.
        PlanError: documents cannot be laid out, or span ranks where attention stays at home.
        DataError: a token of this rank is no whole number, or the model does not know it.
    """
    began = time.perf_counter()
    document_lengths = [[len(document) for document in documents_of] for documents_of in documents.micro_batches]
    homes = documents.homes if any(home is not None for home in documents.homes or ()) else None
    count = len(document_lengths)
    dealt = [room] * count if room and homes is None and count > 1 else None
    inputs = StepInputs(document_lengths, options, homes, dealt)
    announced, generation = (0, 0) if remote is None else (remote.announce(inputs), remote.generation)
    with reporting_failure(inputs, number, folder):
        plan = inputs.plan()
    if remote is not None:
        remote.agree(announced, plan)
    documents, rank, vocabulary = _as_drawn(documents, plan.drawn), taker.rank, taker.vocabulary
    with uploading(taker.device) as upload:
        routes = StepRoutes.of(plan, taker.stage, rank, upload) if options.disaggregate else None
        planning_ms = (time.perf_counter() - began) * 1e3
        rows = [
            rank_batch(documents_of, layouts, rank, align=options.align, chunks=options.shares, weights=weights)
            for documents_of, layouts, weights in zip(
                documents.micro_batches, plan.layouts, documents.weights or repeat(None, len(plan.layouts)), strict=True
            )
        ]
        if vocabulary is not None:
            _check_ids(rows, vocabulary, plan.drawn)
        if routes is None:
            batches = packed_batches(
                rows,
                [
                    replace(
                        packed_attention(layouts[0], rank, upload),
                        recurrent={
                            size: RecurrentRoutes.of(layouts, rank, size, upload)[0]
                            for size in _halos(taker.recurrences)
                        },
                    )
                    for layouts in plan.layouts
                ],
                options,
                upload,
                lengths=taker.lengths,
            )
        else:
            if taker.recurrences:
                routes = _with_pieces(routes, plan, taker, upload)
            batches = tuple(
                batch_on_device(
                    upload, each, DisaggregatedMicroBatch(own, each.nano_rows, options.shares), lengths=taker.lengths
                )
                for each, own in zip(rows, routes.own, strict=True)
            )
    with reporting_failure(inputs, number, folder):
        balance = plan.balance()
    return Step(
        documents,
        plan,
        balance,
        routes,
        batches,
        planning_ms,
        vocabulary=vocabulary,
        announced=announced,
        generation=generation,
    )


def _with_pieces(of_attention: StepRoutes, plan: StepPlan, taker: Taker, upload: Upload) -> StepRoutes:
    """Returns the routes of all layers of this stage: those of layers with attention, and new ones for recurrent
    layers."""
    options = plan.options
    stage, recurrences = taker.stage, taker.recurrences
    here, me = recurrences[: len(recurrences) // options.stages], options.pool_rank(stage, taker.rank)

    def pieces(phase: Phase) -> dict[int, tuple[RecurrentRoutes, ...]]:
        layouts = [each.layout for each in phase.plans]
        return {size: RecurrentRoutes.of(layouts, me, size, upload) for size in _halos(here)}

    def merged(
        attention: Sequence[LayerRoutes], by_size: Mapping[int, tuple[RecurrentRoutes, ...]]
    ) -> tuple[LayerRoutes, ...]:
        rest = iter(attention)
        return tuple(next(rest) if each is None else by_size[each.halo_rows] for each in here)

    def own(micro_batch: int, attention: Sequence[LayerRoutes]) -> tuple[LayerRoutes, ...]:
        there = pieces(plan.forward[plan.forward_phase(micro_batch, stage)])
        if options.stages > 1:  # other stages have other micro-batches in the phase of its backward
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
    """The numbers of rows before a row that the layers' convolutions read, each once."""
    return {each.halo_rows for each in recurrences if each is not None}


def _check_ids(batches: Sequence[RankBatch], vocabulary: int, drawn: Sequence[np.ndarray]) -> None:
    """Refuses token ids that the model does not know, which a split embedding would silently take for zeros.

    ``drawn`` has where documents were before they were dealt anew, for the message.

    Raises:
        DataError: a document has such a token.
    """
    for batch, origin in zip(batches, drawn, strict=True):
        wrong = np.flatnonzero((batch.tokens < 0) | (batch.tokens >= vocabulary))
        if len(wrong):
            micro_batch, place = origin[batch.documents[wrong[0]]]
            raise DataError(
                f"Document {place} of micro-batch {micro_batch} has token {batch.tokens[wrong[0]]}, but the "
                f"model knows 0 to {vocabulary - 1}: correct the data, or build the model with more."
            )


def _as_drawn(documents: StepDocuments, drawn: Sequence[np.ndarray]) -> StepDocuments:
    """Returns documents, with their homes and weights, in the micro-batches into which a plan dealt them."""
    given, weights = documents.micro_batches, documents.weights
    return replace(
        documents,
        micro_batches=[[given[m][d] for m, d in each.tolist()] for each in drawn],
        weights=weights and [np.array([weights[m][d] for m, d in each.tolist()], np.float32) for each in drawn],
    )


def batch_on_device(
    upload: Upload,
    rows: RankBatch,
    attention: DisaggregatedMicroBatch | PackedMicroBatch,
    *,
    lengths: bool = False,
) -> Batch:
    """Returns a rank's rows of a micro-batch, which are on the device once ``upload`` is sent; with ``lengths`` they
    have the lengths of their documents."""
    columns = (rows.tokens, rows.labels, rows.loss_mask, rows.positions, rows.documents)
    tokens, labels, loss_mask, positions, numbers = (upload.add(column)[None] for column in columns)
    if lengths:
        attention = replace(attention, document_lengths=upload.add(rows.lengths))
    attention = replace(attention, documents=numbers[0], document_count=len(rows.micro_batch_lengths))
    return Batch(tokens, labels, loss_mask, positions, numbers, attention, rows.micro_batch_lengths)


def packed_batches(
    rows: Sequence[RankBatch],
    attention: Sequence[PackedMicroBatch],
    options: PlanOptions,
    upload: Upload,
    *,
    lengths: bool = False,
) -> tuple[Batch, ...]:
    """Returns micro-batches whose attention stays at home, for Megatron's own schedules."""
    columns = with_equal_rows(rows) if options.stages > 1 else rows
    return tuple(batch_on_device(upload, *each, lengths=lengths) for each in zip(columns, attention, strict=True))


def packed_attention(layout: Layout, rank: int, upload: Upload) -> PackedMicroBatch:
    """Returns the attention of a rank's whole documents.

    Raises:
        PlanError: a document spans ranks; every rank raises it.
    """
    everyone = layout.q
    cut = everyone.document[(everyone.start > 0) | (everyone.stop < layout.last[everyone.document])]
    if len(cut):
        raise PlanError(
            f"Document {cut[0]} of a micro-batch, of {layout.last[cut[0]]:,} tokens, spans data-parallel ranks, but "
            "`disaggregate` is False, so each stays on one: give them homes (distca.StepDocuments), or set "
            "`disaggregate` to True."
        )
    mine = everyone.on_rank(rank)
    borders = np.concatenate(([0], np.cumsum(mine.stop)))
    return PackedMicroBatch(TaskBatch.of(borders, borders, upload), int(borders[-1]))


def with_equal_rows(batches: Sequence[RankBatch]) -> list[RankBatch]:
    """Pads a rank's micro-batches of a step to the rows of the largest one: token 0, no loss, part of no document.

    Megatron's 1F1B moves activations of one size between stages. If sizes differed, it would first send each size and
    wait for it on the host, at every stage and micro-batch.
    """
    assert all(len(batch.nano_rows) == 1 for batch in batches), "only rows of one nano-batch end where padding begins"
    rows = max(batch.nano_rows[0] for batch in batches)

    def padded(column: np.ndarray, value: int = 0) -> np.ndarray:
        return np.pad(column, (0, rows - len(column)), constant_values=value)

    return [
        replace(
            batch,
            tokens=padded(batch.tokens),
            labels=padded(batch.labels),
            loss_mask=padded(batch.loss_mask),
            positions=padded(batch.positions),
            lengths=padded(batch.lengths),
            documents=padded(batch.documents, -1),
            nano_rows=(rows,),
        )
        for batch in batches
    ]
