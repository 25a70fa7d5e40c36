"""A pipelined step's layouts, and what packed documents would take."""

import numpy as np
import torch

from distca.attention.upload import uploading
from distca.data.sampler import MicroBatch
from distca.plan import analytic_cost, lay_out, plan_at_home, server_seconds
from distca.plan.layout import Layout
from distca.train.pipeline_inputs import plan_pipeline
from distca.train.planning import Planning

COST = analytic_cost(4, 2, 32)
LENGTHS = ([9000, 130, 77, 2049, 1, 4000], [700, 5000, 5000, 300, 12])


def _columns(layouts: tuple[Layout, ...]) -> list[list[int]]:
    return [column.tolist() for layout in layouts for column in (*layout.q.columns(), *layout.kv.columns())]


def test_halves_are_dealt_evenly_and_spread_and_before_is_in_order_and_at_home() -> None:
    planning = Planning(
        rank=0, ranks=3, stage=1, stages=2, cost=COST, disaggregate=True, nano_batches=2, resend=True, tolerance=0.02,
        chunks=1, device=torch.device("cpu"),
    )  # fmt: skip
    micro_batches = [MicroBatch(np.arange(len(each)), np.array(each), None) for each in LENGTHS]
    with uploading(planning.device) as upload:
        made = plan_pipeline(planning, micro_batches, upload, {})
    at_home = []
    for lengths, layouts in zip(LENGTHS, made.layouts, strict=True):
        spread = lay_out(lengths, 3, nano_batches=2, dealing="even", placement="spread", cost=COST)
        assert _columns(layouts) == _columns(spread)
        (packed,) = lay_out(lengths, 3)
        at_home.append([server_seconds(plan_at_home(packed), COST, way) for way in ("forward", "backward")])
    (f0, b0), (f1, b1), idle = *at_home, np.zeros(3)
    forward = [[f0, idle], [f1, f0], [idle, f1]]
    backward = [[idle, b0], [b0, b1], [b1, idle]]
    expected = [np.concatenate(stages) for stages in (*forward, *backward)]
    np.testing.assert_allclose(made.seconds_before, expected)
