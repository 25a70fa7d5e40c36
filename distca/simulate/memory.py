"""Memory of every server at its peak: what is kept for backward, by the rows that the plan gives it.

What a token keeps follows ``distca.train.run.memory``, which predicts a run's stages from its settings; here rows at
servers are those of the plan. Array legend: R ranks of the pool.
"""

from __future__ import annotations

import numpy as np

from distca.simulate.job import VALUE, WIDE, Job

_LOGITS = 2 << 30
"""Bytes of the output layer's chunk of logits (distca/ops/output_loss.py)."""


def static_bytes(job: Job) -> int:
    """Weights, gradients and this rank's share of the optimizer's state."""
    return job.parameters * (VALUE + WIDE) + 12 * job.parameters // job.data_parallel


def kept_per_row(job: Job, *, norms: bool) -> int:
    """Bytes that a layer keeps of a home row beside q, k, v and o: inputs of norms and SwiGLU; Megatron's own layers
    also keep norms' outputs."""
    hidden, ffn = job.model.hidden // job.tp, job.model.ffn // job.tp
    if job.recompute == "all":
        return VALUE * hidden
    elements = (4 if norms else 2) * hidden + (0 if job.recompute == "mlp" else 2 * ffn)
    return VALUE * elements + 8


def working_bytes(job: Job, rows: np.ndarray, last: np.ndarray | bool) -> np.ndarray:
    """[R] bytes of the layer at work or, on the ``last`` stage, the loss, for ``rows`` [R] home rows of a
    micro-batch."""
    hidden, ffn = job.model.hidden // job.tp, job.model.ffn // job.tp
    mlp = rows * VALUE * (3 * ffn + hidden + (2 * ffn if job.recompute != "none" else 0))
    table = job.model.vocabulary * job.model.hidden // job.tp
    loss = _LOGITS + WIDE * table + 3 * VALUE * rows * hidden
    return np.asarray(np.maximum(mlp, np.where(last, loss, 0)))


def at_home(
    job: Job, rows: np.ndarray, kv_rows: np.ndarray, attention_bytes: np.ndarray, in_flight: int, last: bool = True
) -> np.ndarray:
    """[R] bytes on a stage, the ``last`` one or another, where attention is at home: ``kv_rows`` [R] rows of keys and
    values are kept of every layer, and the layer at work takes ``attention_bytes`` [R]."""
    shape = job.shape
    row = kept_per_row(job, norms=True) + 2 * shape.q_bytes + 4 * shape.heads
    layer = rows * row + kv_rows * shape.kv_bytes
    working = np.maximum(working_bytes(job, rows, last), attention_bytes)
    return np.asarray(static_bytes(job) + in_flight * job.layers * layer + working)


def with_servers(
    job: Job, rows: np.ndarray, q_rows: np.ndarray, kv_rows: np.ndarray, received: np.ndarray, in_flight: np.ndarray
) -> np.ndarray:
    """[R] bytes with core attention disaggregation.

    Args:
        job: what runs.
        rows: [R] home rows of a micro-batch.
        q_rows: [R] query rows that a server keeps of one (keep), or home rows (resend).
        kv_rows: [R] key/value rows, likewise.
        received: [R] bytes of the rows at a server while it computes the backward of a half.
        in_flight: [R] micro-batches.
    """
    shape, ranks = job.shape, len(rows)
    last = np.arange(ranks) >= ranks - ranks // job.pp
    # o lives at home, where the output projection keeps it.
    layer = rows * (kept_per_row(job, norms=False) + shape.q_bytes)
    layer = layer + q_rows * (shape.q_bytes + 4 * shape.heads) + kv_rows * shape.kv_bytes
    return np.asarray(
        static_bytes(job) + in_flight * job.layers * layer + np.maximum(working_bytes(job, rows, last) / 2, received)
    )
