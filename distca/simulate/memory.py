"""Memory of every server at its peak: what is kept for backward, by the rows that the plan gives it.

What a token keeps follows ``distca.train.run.memory``, which predicts a run's stages from its settings; here rows at
servers are those of the plan. Array legend: R ranks of the pool.
"""

from __future__ import annotations

import numpy as np

from distca.device.sizes import LOGITS_BYTES
from distca.simulate.job import VALUE, WIDE, Job, Recompute


def static_bytes(job: Job) -> int:
    """Weights, gradients and this rank's share of the optimizer's state, as ``distca.train.run.model_bytes`` has it; in
    FP8 also weights' copies for products with their rows and with their columns."""
    copies = 2 * job.layers * job.model.layer_weights // job.tp if job.fp8 != "none" and job.recompute != "all" else 0
    gradients = VALUE if job.gradients == "bfloat16" else WIDE
    # What bfloat16 weights lack, or float32 ones, and two moments.
    optimizer = 3 * (VALUE if job.moments == "bfloat16" else WIDE)
    return job.parameters * (VALUE + gradients) + copies + optimizer * job.parameters // job.data_parallel


def kept_per_row(job: Job, recompute: Recompute, *, norms: bool) -> int:
    """Bytes that a layer keeps of a home row beside q, k, v and o, where ``recompute`` is computed again: inputs of
    norms and SwiGLU; Megatron's own layers also keep norms' outputs. In FP8 it is copies of what linear layers are
    given, of o where scales come from earlier steps."""
    hidden, ffn = job.model.hidden // job.tp, job.model.ffn // job.tp
    if recompute == "all":
        return VALUE * hidden
    if job.fp8 != "none":
        copies = 2 * hidden + ffn + (job.shape.q_bytes // VALUE if job.fp8 == "delayed" else 0)
        if recompute == "mlp":
            # Megatron's own layers keep the norm's output in place of its copy.
            return VALUE * (3 if norms else 2) * hidden + copies - hidden - ffn + 8
        return VALUE * 2 * (hidden + ffn) + copies + 8
    elements = (4 if norms else 2) * hidden + (0 if recompute == "mlp" else 2 * ffn)
    return VALUE * elements + 8


def layer_at_work(job: Job, rows: np.ndarray, again: np.ndarray | int = 0) -> np.ndarray:
    """[R] bytes of the layer at work on ``rows`` [R] rows; ``again`` [R] of what a layer that is computed again as a
    whole keeps meanwhile."""
    hidden, ffn = job.model.hidden // job.tp, job.model.ffn // job.tp
    recomputed = 2 * ffn if job.recompute != "none" and not np.any(again) else 0
    copies = 2 * job.model.layer_weights // job.tp if job.fp8 != "none" and job.recompute == "all" else 0
    return np.asarray(rows * VALUE * (3 * ffn + hidden + recomputed) + again + copies)


def loss_at_work(job: Job, rows: np.ndarray, last: np.ndarray | bool) -> np.ndarray:
    """[R] bytes of the loss of ``rows`` [R] home rows of a micro-batch, on the ``last`` stage."""
    table = job.model.vocabulary * job.model.hidden // job.tp
    loss = LOGITS_BYTES + WIDE * table + 3 * VALUE * rows * (job.model.hidden // job.tp)
    return np.asarray(np.where(last, loss, 0))


def at_home(
    job: Job, rows: np.ndarray, kv_rows: np.ndarray, attention_bytes: np.ndarray, in_flight: int, last: bool = True
) -> np.ndarray:
    """[R] bytes on a stage, the ``last`` one or another, where attention is at home: ``kv_rows`` [R] rows of keys and
    values are kept of every layer, and the layer at work takes ``attention_bytes`` [R]. Where all is computed again,
    core attention is too, and only a layer's input is kept."""
    shape, whole = job.shape, job.recompute == "all"
    row = kept_per_row(job, "none" if whole else job.recompute, norms=True) + 2 * shape.q_bytes + 4 * shape.heads
    layer = rows * row + kv_rows * shape.kv_bytes
    kept = rows * kept_per_row(job, "all", norms=True) if whole else layer
    working = np.maximum(layer_at_work(job, rows, layer if whole else 0), loss_at_work(job, rows, last))
    return np.asarray(static_bytes(job) + in_flight * job.layers * kept + np.maximum(working, attention_bytes))


def with_servers(
    job: Job, rows: np.ndarray, q_rows: np.ndarray, kv_rows: np.ndarray, received: np.ndarray, in_flight: np.ndarray
) -> np.ndarray:
    """[R] bytes with core attention disaggregation.

    Args:
        job: what runs.
        rows: [R] home rows of a micro-batch.
        q_rows: [R] query rows that a server keeps of one (keep), or home rows (resend), in the mean over layers.
        kv_rows: [R] key/value rows, likewise.
        received: [R] bytes of the rows at a server while it computes the backward of a half.
        in_flight: [R] micro-batches.
    """
    shape, ranks = job.shape, len(rows)
    last = np.arange(ranks) >= ranks - ranks // job.pp
    # o lives at home, where the output projection keeps it.
    layer = rows * (kept_per_row(job, job.recompute, norms=False) + shape.q_bytes)
    layer = layer + q_rows * (shape.q_bytes + job.lse_bytes) + kv_rows * shape.kv_bytes
    if job.model.sinks and not job.resend:
        layer = layer + rows * job.lse_bytes  # with sinks, at home
    # One half is at work in a layer, all of a micro-batch in the loss.
    working = np.maximum(layer_at_work(job, rows / 2), loss_at_work(job, rows, last))
    return np.asarray(static_bytes(job) + in_flight * job.layers * layer + np.maximum(working, received))
