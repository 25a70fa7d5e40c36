"""What ranks really send for layers with windows in a training step: no row of q or o, and of k and v each row that is
read elsewhere once, counted over the documents."""

from collections import Counter

import pytest

from distca.testing.ranks import run_ranks
from tests.megatron_patches import small_cases
from tests.plan.test_kinds_bytes import read_elsewhere

WINDOW, RANKS = 10, 3
KV_BYTES = 2 * 2 * 8 * 4
"""Of a row of k and v, or of their gradients: two heads of eight float32 numbers each."""


def _sent(backward):
    """Bytes of this rank by layer, half, direction and what they are; the layouts, and the window of every layer."""
    small_cases.on_cpu()
    import torch.distributed as dist

    from distca.parity.cases import ParityCase, ParityShape
    from megatron_patches.training.training_step import summed_loss_step

    kinds = {"window_size": (WINDOW - 1, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"}
    lengths, shape = ((61, 7, 1, 29, 3), (50, 2), (9, 10, 11)), ParityShape(layers=4)
    case = ParityCase(micro_batches=lengths, backward=backward, shape=shape, config=kinds)
    cad, model, step = small_cases.ready(case)
    cad.pool.timeline.start_recording()
    cad.forward_backward(step, summed_loss_step, model)
    sent = Counter()
    for event in cad.pool.timeline.take(dist.get_rank()):
        if event["track"].startswith("transfers"):
            what, layer, direction = event["name"].split()
            half = int("pong" in event["track"])
            sent[int(layer), half, direction, what] += event["args"]["bytes sent"]
    (kind_of_layer,) = cad.options.layer_kinds
    return sent, step.plan.layouts, [cad.options.windows[kind] for kind in kind_of_layer]


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["keep", "resend"])
def test_a_step_sends_only_the_rows_that_windows_see(backward):
    ranks = run_ranks(RANKS, _sent, backward)
    sent = sum((each for each, _, _ in ranks), Counter())
    _, layouts, windows = ranks[0]
    assert windows == [WINDOW, 0, WINDOW, 0]
    for half in range(2):
        seen = KV_BYTES * sum(read_elsewhere(each, half, WINDOW) for each in layouts)
        assert seen > 0
        for layer in (0, 2):
            moved = {key[2:]: number for key, number in sent.items() if key[:2] == (layer, half)}
            again = {("backward", "q,k,v,o,dO"): seen} if backward == "resend" else {}
            expected = {("forward", "q,k,v"): seen, ("backward", "dq,dk,dv"): seen, **again}
            assert {key: number for key, number in moved.items() if number} == expected
    assert sum(number for key, number in sent.items() if key[0] == 1 and key[3] == "o") > 0, "full layers send o"
