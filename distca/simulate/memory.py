"""Memory of every server at its peak: what is kept for backward, by the rows that the plan gives it.

What a layer keeps of a token, and needs at work, :mod:`distca.models.layer_bytes` says, here and where a run's stages
are predicted from its settings (``distca.train.run.memory``). Rows at servers are those of the plan. Array legend: R
ranks of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.models.layer_bytes import LayerBytes, expert_parameters_of_rank, parameters_of_rank
from distca.models.model_bytes import StateTypes
from distca.plan.recurrent.traffic import RecurrentNano
from distca.simulate.job import VALUE, Job


@dataclass(frozen=True)
class StateBytes:
    """Bytes of states and summaries in a recurrent layer.

    Attributes:
        kept: [R] of a micro-batch until its backward: states before pieces, and transitions of those between others.
        at_work: [R] summaries of both nano-batches that arrive in one layer.
    """

    kept: np.ndarray
    at_work: np.ndarray

    @staticmethod
    def of(job: Job, halves: Sequence[RecurrentNano]) -> StateBytes:
        """Bytes of the nano-batches of a micro-batch, over the ranks of one stage; stages are alike."""
        what = job.recurrence
        kept = sum(half.continuing * what.state_bytes + half.between * what.transition_bytes for half in halves)
        ways = [sum(getattr(half, way).read_bytes(what) for half in halves) for way in ("forward", "backward")]
        return StateBytes(np.tile(kept, job.pp), np.tile(np.maximum(*ways), job.pp))


def _layers(job: Job, *, disaggregated: bool) -> list[LayerBytes]:
    """The layers of the first stage, which has as many in flight as any."""
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
        for kind in job.model.layer_kinds[: job.layers]
    ]


def static_bytes(job: Job) -> int:
    """Weights, gradients and this rank's share of the optimizer's state on the first stage."""
    layers = _layers(job, disaggregated=True)
    types = StateTypes(
        narrow_gradients=job.gradients == "bfloat16",
        narrow_moments=job.moments == "bfloat16",
        fp8=job.fp8,
        recompute_all=job.recompute == "all",
    )
    parameters = parameters_of_rank(job.model, layers, job.model.vocabulary, True, job.pp == 1)
    dense = types.bytes_of(parameters, sum(layer.weights for layer in layers), job.data_parallel)
    return (dense + types.bytes_of(expert_parameters_of_rank(layers), 0, job.expert_replicas)).held


def _loss_at_work(job: Job, layer: LayerBytes, rows: np.ndarray, last: np.ndarray | bool) -> np.ndarray:
    """[R] bytes of the loss of ``rows`` [R] home rows of a micro-batch, on the ``last`` stage."""
    loss = [layer.loss_at_work(int(each), job.model.vocabulary) for each in rows]
    return np.where(last, loss, 0)


def _layer_at_work(layer: LayerBytes, at_work: np.ndarray, rows: np.ndarray, again: np.ndarray | int = 0) -> np.ndarray:
    """[R] bytes of the layer that works on ``at_work`` [R] of a micro-batch's ``rows`` [R]; ``again`` [R] of what a
    layer that is computed again as a whole keeps meanwhile."""
    around = layer.around_work(1) * rows
    return np.asarray(at_work * layer.mlp_at_work() + again + around + layer.copies_at_work())


def _attending(job: Job) -> int:
    """Layers of a stage with attention."""
    return job.recurrent.count(False)


def at_home(
    job: Job, rows: np.ndarray, kv_rows: np.ndarray, attention_bytes: np.ndarray, in_flight: int, last: bool = True
) -> np.ndarray:
    """[R] bytes on a stage, the ``last`` one or another, where attention is at home: ``kv_rows`` [R] rows of keys and
    values are kept of every layer, and the layer at work takes ``attention_bytes`` [R]. Where all is computed again,
    core attention is too, and only a layer's input is kept."""
    layers = _layers(job, disaggregated=False)
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
    return np.asarray(static_bytes(job) + in_flight * kept + np.maximum(working, attention_bytes))


def with_servers(
    job: Job,
    rows: np.ndarray,
    q_rows: np.ndarray,
    kv_rows: np.ndarray,
    received: np.ndarray,
    in_flight: np.ndarray,
    states: StateBytes | None = None,
) -> np.ndarray:
    """[R] bytes with core attention disaggregation.

    Args:
        job: what runs.
        rows: [R] home rows of a micro-batch.
        q_rows: [R] query rows that a server keeps of one (keep), or home rows (resend), in the mean over layers.
        kv_rows: [R] key/value rows, likewise.
        received: [R] bytes of the rows at a server while it computes the backward of a nano-batch.
        in_flight: [R] micro-batches.
        states: of recurrent layers.
    """
    shape, ranks = job.shape, len(rows)
    home = np.arange(ranks) < job.homes
    last = home & (np.arange(ranks) >= job.homes - job.data_parallel)
    layers = _layers(job, disaggregated=True)
    widest = max(layers, key=LayerBytes.mlp_at_work)
    # Where servers keep rows, o is also at home, among what is kept beside attention.
    attention = q_rows * (shape.q_bytes + widest.lse) + kv_rows * shape.kv_bytes
    if job.resend:
        attention = attention + rows * shape.o_bytes
    else:
        # Servers without a model keep o of all their rows.
        attention = attention + np.where(home, rows * widest.lse if job.model.sinks else 0, q_rows * shape.o_bytes)
    kept = rows * sum(layer.kept_beside_attention() for layer in layers) + _attending(job) * attention
    # One nano-batch is at work in a layer, all of a micro-batch in the loss.
    working = np.maximum(_layer_at_work(widest, rows / 2, rows), _loss_at_work(job, widest, rows, last))
    if states is not None:
        kept = kept + job.recurrent.count(True) * states.kept
        core = max(layer.core_at_work() for layer in layers) * rows / 2
        working = np.maximum(working, core + widest.around_work(1) * rows) + states.at_work
    held = np.where(home, static_bytes(job), 0)
    return np.asarray(held + in_flight * kept + np.where(home, np.maximum(working, received), received))
