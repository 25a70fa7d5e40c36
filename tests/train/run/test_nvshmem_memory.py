"""The default size of NVSHMEM's memory holds the exchanges of real plans, in the order in which layers make them."""

import numpy as np
import pytest

from distca.data.mixes import sample_long_context
from distca.errors import TransportError
from distca.plan import route
from distca.plan.cost.analytic import analytic_cost
from distca.plan.micro_batch import plan_micro_batch
from distca.train.config.cli import parse_run_config
from distca.transport.nvshmem.receive_ring import ReceiveRing

TOKENS, LAYERS = 131_072, 3


def _config(backward):
    shape = ["--config", "configs/llama-8b.yaml", "--parallel.tp", "1", "--cad.backward", backward]
    return parse_run_config([*shape, "--data.tokens_per_rank", str(TOKENS)])


def _run(ring, plans, config):
    """All exchanges of a forward and a backward, as runtime/ping_pong.py and its backward launch and join them."""
    model, resend = config.model, config.resolved_backward == "resend"
    q, kv, lse = (
        2 * model.heads * model.resolved_head_dim,
        4 * model.kv_heads * model.resolved_head_dim,
        4 * model.heads,
    )

    def there(plan, sent_again):
        part = route(plan, 0)
        widths = [q, kv] + [q, q, lse] * sent_again
        rows = [part.q.most_to_server, part.kv.most_to_server] + [part.q.most_to_server] * 3 * sent_again
        return rows, widths

    def back(plan, widths):
        part = route(plan, 0)
        return [part.kv.most_to_home if width == kv else part.q.most_to_home for width in widths], widths

    def place(rows, widths):
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


@pytest.mark.parametrize("backward", ["keep", "resend"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_default_holds_the_exchanges_of_real_plans(ranks, backward):
    config = _config(backward)
    capacity = int(config.resolved_nvshmem_buffer_gb * 2**30)
    model = config.model
    cost = analytic_cost(model.heads, model.kv_heads, model.resolved_head_dim)
    refused = 0
    for mix in ("pretrain", "prolong"):
        for seed in range(3):
            lengths = sample_long_context(mix, TOKENS * ranks, TOKENS, seed=seed)
            plans = plan_micro_batch(lengths, ranks, cost, nano_batches=2, resend=backward == "resend")
            _run(ReceiveRing(capacity, "THE_SETTING"), plans, config)
            try:
                _run(ReceiveRing(capacity // 8, "THE_SETTING"), plans, config)
            except TransportError:
                refused += 1
    assert refused > 0 or ranks == 2, "an eighth of it would do as well"


def test_less_where_heads_are_sharded():
    sizes = [
        parse_run_config(["--config", "configs/llama-8b.yaml", "--parallel.tp", str(tp)]).resolved_nvshmem_buffer_gb
        for tp in (1, 8)
    ]
    assert np.isclose(sizes[0], 8 * sizes[1])
