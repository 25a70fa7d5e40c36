"""How much memory the rows need that a rank receives at once."""

from __future__ import annotations

from distca.plan.cost.model import AttentionShape

_LEAST_GB = 0.25


def receive_buffer_gb(shape: AttentionShape, tokens: int, *, resend: bool, sinks: bool = False) -> float:
    """GiB of memory in which rows of two exchanges land, which are under way at a time; each has up to the rows of a
    nano-batch that the busiest rank receives.

    In rows of q, k and v of a rank's tokens. Real plans without pipeline stages, of both mixes in their long-context
    versions, fit for 2 to 16 ranks, also on nodes of 4 and of 8 (tests/plan/test_receive_buffer.py).

    Args:
        shape: heads of one rank.
        tokens: of a micro-batch, per rank.
        resend: backward sends q, k, v and o again, with dO.
        sinks: with keep too o comes home with its log-sum-exp, which goes out again with dO.
    """
    rows = (5.0 if resend else 4.5) * tokens
    lse = 4 * shape.heads if sinks and not resend else 0
    return max(rows * (shape.q_bytes + shape.kv_bytes + lse) / 2**30, _LEAST_GB)
