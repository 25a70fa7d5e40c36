"""A pipelined step's layouts, and what packed documents would take."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from distca.data.sampler import MicroBatch
from distca.device.host_to_device import uploading
from distca.errors import ConfigError
from distca.plan import analytic_cost, lay_out, plan_at_home, server_seconds
from distca.plan.cost.analytic import area_cost
from distca.plan.cost.model import Direction, LinearRate
from distca.plan.cost.table_file import find_table
from distca.plan.layout import Layout
from distca.plan.metrics import traffic
from distca.plan.pipeline import Phase, StageLayers
from distca.train.config.cli import parse_run_config
from distca.train.data.pipeline_inputs import PipelineInputs, plan_pipeline
from distca.train.data.plan_options import Planning
from distca.train.run.linear_cost import BesideAttention, beside_attention

COST = analytic_cost(4, 2, 32)
LENGTHS = ([9000, 130, 77, 2049, 1, 4000], [700, 5000, 5000, 300, 12])


PLANNING = Planning(
    rank=0, ranks=3, stage=1, stages=2, layers=StageLayers(1, 1), cost=COST, disaggregate=True, nano_batches=2,
    resend=True, tolerance=0.02, chunks=1, device=torch.device("cpu"),
)  # fmt: skip


def _plan(planning: Planning) -> PipelineInputs:
    micro_batches = [MicroBatch(np.arange(len(each)), np.array(each), None) for each in LENGTHS]
    with uploading(planning.device) as upload:
        return plan_pipeline(planning, micro_batches, upload, {})


def _columns(layouts: tuple[Layout, ...]) -> list[list[int]]:
    return [column.tolist() for layout in layouts for column in (*layout.q.columns(), *layout.kv.columns())]


def test_halves_are_dealt_evenly_and_spread_and_before_is_in_order_and_at_home() -> None:
    made = _plan(PLANNING)
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


def test_figures_of_a_phase_are_means_over_its_layers() -> None:
    made = _plan(replace(PLANNING, layers=StageLayers(6, 1, 2, 3)))
    phases: list[tuple[Direction, Phase]] = [("forward", each) for each in made.plan.forward]
    phases += [("backward", each) for each in made.plan.backward]
    moved = 0.0
    for number, (direction, phase) in enumerate(phases):
        plans = [plan for layer in phase.by_layer for plan in layer.plans]
        seconds = sum(server_seconds(plan, COST, direction) for plan in plans) / 6
        assert len(phase.by_layer) == 6
        np.testing.assert_allclose(made.seconds_after[number], seconds)
        np.testing.assert_allclose(made.work.seconds[number], seconds)
        q_bytes, kv_bytes = COST.shape.moved_bytes(direction, resend=True)
        moved += sum(traffic(plan).q_rows * q_bytes + traffic(plan).kv_rows * kv_bytes for plan in plans) / 6
    assert made.bytes_moved == round(moved)
    # At home the last stage attends in one layer of six.
    assert made.seconds_before[0, 3:].sum() == 0 and made.seconds_before[1, 3:].sum() == pytest.approx(
        made.seconds_before[0, :3].sum() / 6
    )


def test_idle_stages_take_more_attention_where_time_is_leveled() -> None:
    # By pairs, so that rows are fine enough for any shares.
    attention = _plan(replace(PLANNING, cost=area_cost()))
    per_row = float(attention.seconds_after[:3].sum()) / sum(map(sum, LENGTHS)) / 4
    time = _plan(replace(PLANNING, cost=area_cost(), beside=BesideAttention(per_row, 2 * per_row)))
    assert not attention.seconds_beside.any()
    for phase, (made, beside) in enumerate(zip(time.seconds_after, time.seconds_beside, strict=True)):
        first, second = made[:3], made[3:]
        rows = np.array([sum(LENGTHS[0]), sum(LENGTHS[1])])
        own = np.add.reduceat(beside, [0, 3]) / per_row
        # Forward phases run micro-batches 0; 1 and 0; 1 on stages 0 and 1, backward phases the other way round.
        wanted = [[rows[0], 0], [rows[1], rows[0]], [0, rows[1]], [0, 2 * rows[0]], 2 * rows, [2 * rows[1], 0]]
        assert own == pytest.approx(np.array(wanted[phase]))
        both = made + beside
        assert both.max() <= 1.03 * both.mean(), "linear layers and attention together are level"
        idle = {0: second, 2: first, 3: first, 5: second}.get(phase)
        if idle is not None:
            assert idle.min() > 1.2 * (made.sum() - idle.sum()) / 3
    assert _over(time.seconds_after + time.seconds_beside) < _over(attention.seconds_after + time.seconds_beside)


def _over(seconds: np.ndarray) -> float:
    return float(seconds.max(axis=1).sum())


def test_what_busy_stages_compute_beside_attention() -> None:
    table = find_table("NVIDIA H200", "flash4", 32, 8, 128)
    assert table is not None and table.linear is not None
    weights = 4096 * 128 * 80 + 3 * 4096 * 14336
    assert table.linear.forward * weights == pytest.approx(6.07516e-07)
    cost = replace(analytic_cost(32, 8, 128), linear=LinearRate(1e-15, 3e-15))

    def beside(*settings: str, on_gpu: bool = False) -> BesideAttention | None:
        line = ["--config", "configs/llama-8b.yaml", "--parallel.tp", "2", "--parallel.pp", "4", "--cad.level", "time"]
        return beside_attention(parse_run_config([*line, *settings]), cost, on_gpu)

    each = 7 / 8 / 2 * weights * 1e-15  # 32 layers over 4 stages, half of every weight
    plain = beside("--train.recompute", "none")
    assert plain is not None and (plain.forward, plain.backward) == pytest.approx((each, 3 * each))
    recomputing = beside("--train.recompute", "all")
    assert recomputing is not None and recomputing.backward == pytest.approx(4 * each)
    mlps = beside("--train.recompute", "mlp")
    assert mlps is not None and mlps.backward == pytest.approx((3 + 3 * 4096 * 14336 / weights) * each)
    assert beside("--cad.level", "attention") is None and beside("--cad.enabled", "false") is None
    usual = ("--train.recompute", "none", "--cad.level", "auto")
    assert beside(*usual) is None and beside(*usual, on_gpu=True) == plain
    for never in (
        ("--parallel.pp", "1"),
        ("--cad.ping_pong", "false"),
        ("--cad.enabled", "false"),
        ("--cad.transport", "nvshmem"),
    ):
        assert beside(*usual, *never, on_gpu=True) is None
    assert beside_attention(parse_run_config(["--parallel.pp", "2"]), area_cost(), True) is None
    with pytest.raises(ConfigError, match="no cost table of this device and kernel says what linear layers take"):
        beside_attention(parse_run_config(["--parallel.pp", "2", "--cad.level", "time"]), area_cost(), False)
