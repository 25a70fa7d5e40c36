"""States and summaries on busy ranks: predicted against layouts of the mixes."""

import numpy as np
import pytest

from distca.data.mixes import sample_long_context
from distca.plan import PlanOptions, plan_step
from distca.plan.cost.analytic import area_cost
from distca.plan.recurrence import Recurrence
from distca.plan.recurrent.traffic import recurrent_nanos
from distca.train.run.state_memory import busy_pieces, state_memory

TOKENS = 131_072


@pytest.mark.parametrize(("ranks", "context"), [(2, TOKENS), (8, 4 * TOKENS), (64, TOKENS), (64, 4 * TOKENS)])
def test_no_layout_has_much_more_and_the_busiest_not_much_less(ranks: int, context: int) -> None:
    cost, found = area_cost(4, 1, 256), np.zeros(3)
    for mix in ("pretrain", "prolong"):
        for seed in range(2):
            lengths = sample_long_context(mix, ranks * TOKENS, context, seed)
            plan = plan_step([lengths], PlanOptions(ranks, cost, nano_batches=2))
            halves = recurrent_nanos(plan.layouts[0], 3)
            read = [sum(getattr(half, way).read for half in halves).max() for way in ("forward", "backward")]
            states = [sum(getattr(half, name) for half in halves).max() for name in ("continuing", "between")]
            found = np.maximum(found, [*states, max(read)])
    predicted = np.array(busy_pieces(ranks, context / TOKENS))
    assert (found <= 1.15 * predicted + 1).all() and (predicted <= 3 * found + 1).all(), (found, predicted)


def test_bytes_by_hand() -> None:
    what = Recurrence.gated_delta_net(16, 32, 128, 128)
    memory = state_memory(what, 2, 1)
    assert memory.kept == (3 + 1) * 2**21
    assert memory.at_work == int(6.6 * 2**22)
