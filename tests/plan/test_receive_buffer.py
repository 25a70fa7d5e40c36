"""The memory in which rows land holds the exchanges of real plans, in the order in which layers make them."""

from __future__ import annotations

import pytest

from distca.data.mixes import Mix, sample_long_context
from distca.errors import TransportError
from distca.plan import AttentionShape, Links, analytic_cost, route
from distca.plan.metrics import receive_buffer_gb
from distca.plan.micro_batch import MicroBatchPlan, plan_micro_batch
from distca.plan.plan import Plan
from distca.transport.nvshmem.receive_ring import ReceiveRing

TOKENS, LAYERS = 131_072, 3
SHAPE = AttentionShape(32, 8, 128)
Exchange = tuple[list[int], list[int]]  # rows, and bytes of a row


def _run(ring: ReceiveRing, plans: MicroBatchPlan) -> None:
    """All exchanges of a forward and a backward, as runtime/ping_pong.py and its backward launch and join them."""
    q, kv, lse, resend = SHAPE.q_bytes, SHAPE.kv_bytes, 4 * SHAPE.heads, plans.resend

    def there(plan: Plan, sent_again: bool) -> Exchange:
        part = route(plan, 0, plans.step.options.links)
        widths = [q, kv, kv] + [q, q, lse] * sent_again
        relayed = part.relay.most_to_server if part.relay is not None else 0
        rows = [part.q.most_to_server, part.kv.most_to_server, relayed] + [part.q.most_to_server] * 3 * sent_again
        return rows, widths

    def back(plan: Plan, widths: list[int]) -> Exchange:
        part = route(plan, 0, plans.step.options.links)
        relayed = part.relay.most_to_home if part.relay is not None and kv in widths else 0
        rows = [part.kv.most_to_home if width == kv else part.q.most_to_home for width in widths]
        return [*rows, relayed], [*widths, kv]

    def place(rows: list[int], widths: list[int]) -> int:
        return ring.place(tuple(r * w for r, w in zip(rows, widths, strict=True))).number

    halves = plans.nano_batches
    qkv = [there(half.forward, False) for half in halves]
    o = [back(half.forward, [q, lse] if resend else [q]) for half in halves]
    do = [there(half.backward, True) if resend else (qkv[n][0][:1], [q]) for n, half in enumerate(halves)]
    gradients = [back(half.backward, [q, kv]) for half in halves]
    under_way = [place(*qkv[n]) for n in (0, 1)]
    for layer in range(LAYERS):
        for what in (o, qkv):
            for n in (0, 1):
                ring.consumed(under_way[n])
                if what is o or layer + 1 < LAYERS:
                    under_way[n] = place(*what[n])
    under_way = [place(*do[n]) for n in (1, 0)][::-1]
    for layer in range(LAYERS):
        for what in (gradients, do):
            for n in (1, 0):
                ring.consumed(under_way[n])
                if what is gradients or layer + 1 < LAYERS:
                    under_way[n] = place(*what[n])


@pytest.mark.parametrize("resend", [False, True])
@pytest.mark.parametrize("ranks,per_node", [(2, 0), (4, 0), (8, 0), (16, 0), (16, 4), (16, 8)])
def test_it_holds_the_exchanges_of_real_plans(ranks: int, per_node: int, resend: bool) -> None:
    capacity = int(receive_buffer_gb(SHAPE, TOKENS, resend=resend) * 2**30)
    cost = analytic_cost(SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim)
    mixes: tuple[Mix, ...] = ("pretrain", "prolong")
    refused = 0
    for mix in mixes:
        for seed in range(3):
            lengths = sample_long_context(mix, TOKENS * ranks, TOKENS, seed=seed)
            plans = plan_micro_batch(lengths, ranks, cost, nano_batches=2, resend=resend, links=Links(per_node))
            _run(ReceiveRing(capacity, "THE_SETTING"), plans)
            try:
                _run(ReceiveRing(capacity // 8, "THE_SETTING"), plans)
            except TransportError:
                refused += 1
    assert refused > 0 or ranks == 2, "an eighth of it would do as well"


def test_less_where_heads_are_sharded_and_never_too_little() -> None:
    whole, shared = (
        receive_buffer_gb(AttentionShape(heads, heads // 4, 128), TOKENS, resend=False) for heads in (32, 4)
    )
    assert whole == pytest.approx(8 * shared)
    assert receive_buffer_gb(SHAPE, 1, resend=True) == 0.25


def test_a_run_without_the_setting_asks_for_it() -> None:
    from distca.train.config.cli import parse_run_config

    line = ["--config", "configs/llama-8b.yaml", "--parallel.tp", "8", "--data.tokens_per_rank", str(TOKENS)]
    for backward in ("keep", "resend"):
        config = parse_run_config([*line, "--cad.backward", backward])
        expected = receive_buffer_gb(AttentionShape(4, 1, 128), TOKENS, resend=backward == "resend")
        assert config.resolved_nvshmem_buffer_gb == expected
    assert parse_run_config([*line, "--cad.nvshmem_buffer_gb", "3"]).resolved_nvshmem_buffer_gb == 3
