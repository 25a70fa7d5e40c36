"""The memory that servers without a model take in a plan, for ``distca plan``."""

from __future__ import annotations

import numpy as np

from distca.plan import MicroBatchPlan, context_rows

_LSE_BYTES = 4
"""Bytes of the log-sum-exp of a query head and row, in float32."""


def server_bytes(made: MicroBatchPlan, layers: int) -> np.ndarray:
    """[S] int64 bytes of every server without a model when backward begins: what it keeps of the micro-batch in so many
    ``layers``, and what the kernel's backward of one nano-batch takes. With resend it keeps nothing.

    Kept are q, k, v, o and log-sum-exp. At work are float32 gradients of all rows and rounded ones, dO, o put together,
    and copies of keys that tasks share; with resend also the rows themselves.
    """
    shape, homes = made.cost.shape, made.step.options.homes
    kept = np.zeros(made.step.options.pool_ranks)
    at_work = np.zeros_like(kept)
    for nano in made.every_nano_batch:
        tasks = nano.backward.tasks
        q = np.bincount(tasks.server, tasks.stop - tasks.start, len(kept))
        once, copied = context_rows(nano.backward)
        q_bytes = shape.q_bytes + shape.o_bytes + _LSE_BYTES * shape.heads
        kept += nano.share * (q * q_bytes + once * shape.kv_bytes)
        wide = 3 * shape.q_bytes + shape.o_bytes + (q_bytes if made.resend else 0)
        keys = 3 * np.maximum(once, copied) + copied + (once if made.resend else 0)
        at_work = np.maximum(at_work, q * wide + keys * shape.kv_bytes)
    return np.asarray(((0 if made.resend else layers * kept) + at_work)[homes:].astype(np.int64))
