"""Draw docs/images/balance.svg: planned attention per rank of one micro-batch, computed at home and disaggregated.

    python docs/draw_balance.py

The documents are drawn from the Pretrain mix, with a fixed seed; times are those of the planner's analytic cost model.
"""

import argparse
from pathlib import Path

from distca.data.mixes import sample_lengths
from distca.plan import analytic_cost, plan_micro_batch
from distca.train.metrics.plots import plot_balance

RANKS = 16
TOKENS_PER_RANK = 65_536


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lengths = sample_lengths("pretrain", RANKS * TOKENS_PER_RANK, seed=0)
    plan = plan_micro_batch(lengths, RANKS, analytic_cost(heads=32, kv_heads=8, head_dim=128))
    mean = plan.seconds_before.mean()
    plot_balance(
        Path(__file__).parent / "images" / "balance.svg",
        plan.seconds_before / mean,
        plan.seconds_after / mean,
        unit="mean at home = 1",
        title=f"Planned attention time of {RANKS} ranks, {TOKENS_PER_RANK // 1024}K tokens each (Pretrain mix)",
    )


if __name__ == "__main__":
    main()
