"""The bytes that ranks hand to a transport are those that plans are priced by."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distca.attention.reference import ReferenceKernel
from distca.plan import AttentionKind, Links, analytic_cost, lay_out, plan_micro_batch
from distca.plan.choice import price_of
from distca.plan.cost.analytic import cost_of_kind
from distca.runtime import AttentionPool, NanoRoutes
from distca.runtime.attention_call import AttentionCall
from distca.runtime.timeline import Timeline
from distca.testing.plans import random_plan

RANKS, HEADS, GROUPS, DIM = 4, 4, 2, 8
COST = analytic_cost(HEADS, GROUPS, DIM)


class Counting:
    """A transport that moves nothing. Its attribute ``bytes`` has [2] bytes sent and received in each launch."""

    name, ranks = "gloo", RANKS

    def __init__(self, rank):
        self.rank, self.bytes = rank, []

    def launch(self, parts):
        found = np.zeros(2, np.int64)
        for part in parts:
            row = part.source[:1].nbytes if len(part.source) else part.destination[:1].nbytes
            found += [row * sum(part.moves.send_counts), row * sum(part.moves.receive_counts)]
            part.destination.zero_()
        self.bytes.append(found)
        return SimpleNamespace(wait=lambda: None)


def _counted(rank, forward, backward, kind, resend):
    """[2, 2] bytes that a rank sends and receives, in forward and in backward."""
    transport = Counting(rank)
    pool = AttentionPool(transport, ReferenceKernel(), Timeline("cpu"), "resend" if resend else "keep")
    call = AttentionCall(pool, NanoRoutes.of(forward, backward, rank, [kind], "cpu"), 0, 0)
    rows = int(forward.layout.q_rows[rank])
    q, kv = (torch.zeros(rows, *of, DIM, dtype=torch.bfloat16, requires_grad=True) for of in ((HEADS,), (2, GROUPS)))
    sink = torch.zeros(HEADS, requires_grad=True) if kind.sink else None
    out = call.join_o(call.launch_o(call.serve(call.join_qkv(call.launch_qkv(q, kv))), sink), sink)
    out.backward(torch.zeros_like(out))
    there, o, do, gradients = transport.bytes
    return np.stack([there + o, do + gradients])


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("resend", [False, True])
def test_a_price_has_the_bytes_that_travel(resend, sink):
    kind = AttentionKind(DIM**-0.5, sink=sink)
    (layout,) = lay_out([700, 90, 1, 300], RANKS)
    forward = random_plan(layout, 3)
    backward = random_plan(layout, 4) if resend else forward
    counted = np.stack([_counted(rank, forward, backward, kind, resend) for rank in range(RANKS)])
    sent, received = counted[..., 0], counted[..., 1]
    assert sent.any(axis=0).all() and (sent.sum(axis=0) == received.sum(axis=0)).all()
    price = price_of([(forward, backward)], COST, Links(), resend, sink)
    assert price.bytes == sent.sum()
    # With one nano-batch no transfer is hidden.
    waited = np.maximum(sent, received).max(axis=0).sum() / Links().bytes_per_s(far=False)
    assert price.exposed == pytest.approx(waited, rel=1e-12)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("resend", [False, True])
def test_a_plan_says_the_bytes_that_travel(resend, sink):
    kind = AttentionKind(DIM**-0.5, sink=sink)
    how = {"kinds": (kind,), "costs": (cost_of_kind(kind, COST),), "layer_kinds": ((0,),)}
    made = plan_micro_batch([900, 90, 1, 300], RANKS, COST, resend=resend, **how)
    (nano,) = made.nano_batches
    counted = sum(_counted(rank, nano.forward, nano.backward, kind, resend)[:, 0] for rank in range(RANKS))
    said = made.bytes_moved
    assert [said.q + said.o + said.kv, said.backward] == counted.tolist() and all(counted)
    assert made.step.balance().bytes_moved == said.total
