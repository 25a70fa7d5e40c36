"""Predicts each server's memory at its peak in a simulated step.

Bytes per token come from :mod:`distca.models.layer_bytes`: those that a layer keeps for backward, and those that it
needs while it computes. The prediction of a run's memory (``distca.train.run.memory``) uses the same figures. The
number of rows on each server comes from the step's plan. Array legend: R servers of all pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.models.layer_bytes import LayerBytes, expert_parameters_of_rank, parameters_of_rank
from distca.models.mlp import Mlp
from distca.models.model_bytes import StateTypes
from distca.plan.recurrent.traffic import RecurrentNano
from distca.simulate.job import VALUE, Job


@dataclass(frozen=True)
class StateBytes:
    """Bytes of states in a recurrent layer, whose documents are cut into pieces on several ranks.

    Attributes:
        kept: [R] bytes that a micro-batch keeps until its backward: states before pieces, and transitions of pieces
            between others.
        at_work: [R] bytes of the summaries of pieces that arrive while one layer computes.
    """

    kept: np.ndarray
    at_work: np.ndarray

    @staticmethod
    def of(job: Job, batches: Sequence[RecurrentNano]) -> StateBytes:
        """Returns the bytes for a micro-batch's nano-batches, which are counted over one stage; stages are alike."""
        what = job.recurrence
        kept = sum(batch.continuing * what.state_bytes + batch.between * what.transition_bytes for batch in batches)
        ways = [sum(getattr(batch, way).read_bytes(what) for batch in batches) for way in ("forward", "backward")]
        of_servers = np.zeros(job.extra_servers)  # without a model they have no such layers
        return StateBytes(*(np.append(np.tile(each, job.pp), of_servers) for each in (kept, np.maximum(*ways))))


def _layers(job: Job, *, disaggregated: bool, stage: int = 0) -> list[LayerBytes]:
    """Returns the layers of a stage."""
    return [
        LayerBytes(
            shape=job.model,
            kind=kind,
            tp=job.tp,
            ep=job.ep,
            value=VALUE,
            fp8=job.fp8,
            recompute=job.recompute,
            disaggregated=disaggregated,
            keep=not job.resend,
            keep_outputs=job.keep_outputs,
        )
        for kind in job.model.layer_kinds[stage * job.layers : (stage + 1) * job.layers]
    ]


def static_bytes(job: Job, stage: int = 0) -> int:
    """Returns the bytes of weights, gradients and optimizer state on a rank of a stage."""
    layers = _layers(job, disaggregated=True, stage=stage)
    types = StateTypes(
        narrow_gradients=job.gradients == "bfloat16",
        narrow_moments=job.moments == "bfloat16",
        fp8=job.fp8,
        recompute_all=job.recompute == "all",
    )
    parameters = parameters_of_rank(job.model, layers, job.model.vocabulary, stage == 0, stage == job.pp - 1)
    dense = types.bytes_of(parameters, sum(layer.weights for layer in layers), job.data_parallel)
    return (dense + types.bytes_of(expert_parameters_of_rank(layers), 0, job.expert_replicas)).held


def _loss_at_work(job: Job, layer: LayerBytes, rows: np.ndarray, last: np.ndarray | bool) -> np.ndarray:
    """Returns [R] bytes that the loss needs for ``rows`` [R] of a micro-batch; 0 where ``last`` is False."""
    loss = [layer.loss_at_work(int(each), job.model.vocabulary) for each in rows]
    return np.where(last, loss, 0)


def _layer_at_work(layer: LayerBytes, at_work: np.ndarray, rows: np.ndarray, again: np.ndarray | int = 0) -> np.ndarray:
    """Returns [R] bytes that a layer needs while it computes.

    Args:
        layer: the layer's bytes per row.
        at_work: [R] the rows that it computes at once.
        rows: [R] all rows of the micro-batch.
        again: [R] the bytes that a layer keeps for its own backward if it is recomputed as a whole; 0 else.
    """
    around = layer.around_work(1) * rows
    of_row = max(layer.mlp_at_work(), layer.latent_at_work())
    return np.asarray(at_work * of_row + again + around + layer.copies_at_work())


def _attending(job: Job) -> int:
    """Returns the number of a stage's layers with attention."""
    return job.recurrent.count(False)


def at_home(
    job: Job, rows: np.ndarray, kv_rows: np.ndarray, attention_bytes: np.ndarray, in_flight: int, stage: int = 0
) -> np.ndarray:
    """Returns [R] bytes of memory of a stage's ranks with a baseline, in which ranks compute their own attention.

    With recomputation of everything a layer keeps its input only, as core attention is recomputed too.

    Args:
        job: the model, the cluster and the parallelism.
        rows: [R] rows of a micro-batch.
        kv_rows: [R] rows of keys and values that each layer keeps.
        attention_bytes: [R] further bytes that core attention needs in the layer at work.
        in_flight: number of micro-batches that wait for backward.
        stage: number of the stage.
    """
    last = stage == job.pp - 1
    layers = _layers(job, disaggregated=False, stage=stage)
    widest, shape = max(layers, key=LayerBytes.mlp_at_work), job.shape
    attention = rows * (shape.q_bytes + shape.o_bytes + widest.lse) + kv_rows * shape.kv_bytes
    kept = rows * sum(layer.kept_beside_attention() for layer in layers)
    again: np.ndarray | int = 0
    if widest.recomputed_whole:
        again = rows * widest.segment() + attention
    else:
        kept = kept + _attending(job) * attention
    working = np.maximum(_layer_at_work(widest, rows, rows, again), _loss_at_work(job, widest, rows, last))
    core = max(layer.core_at_work() for layer in layers) * rows
    working = np.maximum(working, core + widest.around_work(1) * rows)
    return np.asarray(static_bytes(job, stage) + in_flight * kept + np.maximum(working, attention_bytes))


def with_servers(
    job: Job,
    rows: np.ndarray,
    q_rows: np.ndarray,
    kv_rows: np.ndarray,
    received: np.ndarray,
    in_flight: np.ndarray,
    states: StateBytes | None = None,
) -> np.ndarray:
    """Returns [R] bytes of memory with core attention disaggregation.

    Args:
        job: the model, the cluster and the parallelism.
        rows: [R] home rows of a micro-batch.
        q_rows: [R] query rows of a micro-batch that are kept for backward, in the mean over layers. With "keep" the
            server keeps its tasks' rows, with "resend" a home keeps its own.
        kv_rows: [R] key/value rows that are kept, likewise.
        received: [R] bytes of rows on a server while it computes the backward of a nano-batch.
        in_flight: [R] number of micro-batches that wait for backward.
        states: bytes of states in recurrent layers; None without such layers.
    """
    of_stage = np.minimum(np.arange(len(rows)) // job.data_parallel, job.pp - 1)
    # Stages with the same MLPs need the same; the first layers of some models have no experts.
    stages: dict[tuple[Mlp, ...], list[int]] = {}
    for stage in range(job.pp):
        kinds = job.model.layer_kinds[stage * job.layers : (stage + 1) * job.layers]
        stages.setdefault(tuple(kind.mlp for kind in kinds), []).append(stage)
    found = np.zeros(len(rows))
    for alike in stages.values():
        each = _with_servers(job, rows, q_rows, kv_rows, received, in_flight, states, alike[0])
        found = np.where(np.isin(of_stage, alike), each, found)
    held = np.array([static_bytes(job, stage) for stage in range(job.pp)])
    return np.asarray(found + np.where(np.arange(len(rows)) < job.homes, held[of_stage], 0))


def _with_servers(
    job: Job,
    rows: np.ndarray,
    q_rows: np.ndarray,
    kv_rows: np.ndarray,
    received: np.ndarray,
    in_flight: np.ndarray,
    states: StateBytes | None,
    stage: int,
) -> np.ndarray:
    """Returns [R] bytes beside weights, gradients and optimizer state, if all ranks had the layers of ``stage``."""
    shape, ranks = job.shape, len(rows)
    home = np.arange(ranks) < job.homes
    last = home & (np.arange(ranks) >= job.homes - job.data_parallel)
    layers = _layers(job, disaggregated=True, stage=stage)
    widest = max(layers, key=LayerBytes.mlp_at_work)
    # With keep, homes keep o too: the output projection needs it, so it counts among the bytes beside attention.
    attention = q_rows * (shape.q_bytes + widest.lse) + kv_rows * shape.kv_bytes
    if job.resend:
        attention = attention + rows * shape.o_bytes
    else:
        # Servers without a model have no home rows, so they keep o of all their tasks' rows.
        attention = attention + np.where(home, rows * widest.lse if job.model.sinks else 0, q_rows * shape.o_bytes)
    kept = rows * sum(layer.kept_beside_attention() for layer in layers) + _attending(job) * attention
    # A layer computes one nano-batch at a time, the loss a whole micro-batch.
    at_once = rows / job.nano_batches
    working = np.maximum(_layer_at_work(widest, at_once, rows), _loss_at_work(job, widest, rows, last))
    if states is not None:
        kept = kept + job.recurrent.count(True) * states.kept
        core = max(layer.core_at_work() for layer in layers) * at_once
        working = np.maximum(working, core + widest.around_work(1) * rows) + states.at_work
    return np.asarray(in_flight * kept + np.where(home, np.maximum(working, received), received))
