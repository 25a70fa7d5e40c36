import numpy as np

from distca.plan import Plan, TableCost, analytic_cost, lay_out, plan_at_home, server_seconds
from distca.plan.cost.pool import ServerWork
from distca.plan.network import Links
from distca.plan.scheduler.state import MovedRanges, Pieces, SchedulerState
from distca.plan.scheduler.target_load import TargetLoad

Q_ROWS, KV_ROWS = np.array([64, 128, 256, 512, 1024]), np.array([1024, 4096])


def dear_when_long() -> TableCost:
    """A table by which a range of 512 rows or more takes half as long again as its parts together."""
    base = analytic_cost(4, 2, 32)
    grid = np.meshgrid(Q_ROWS.astype(float), KV_ROWS.astype(float), indexing="ij")
    factor = np.where(Q_ROWS >= 512, 1.5, 1.0)[:, None]
    return TableCost(base.shape, Q_ROWS, KV_ROWS, base.forward(*grid) * factor, base.backward(*grid) * factor, block=64)


def test_loads_count_ranges_that_met_on_a_server_as_one() -> None:
    cost = dear_when_long()
    (layout,) = lay_out([1024, 512], 2, rank_of=[0, 1])
    home = plan_at_home(layout)
    state = SchedulerState(home, ServerWork("both", (cost,)), TargetLoad(2, None), tolerance=0.02, links=Links())
    for start, stop in ((256, 512), (512, 768)):
        pieces = state.pieces_of(0)
        piece = int(np.flatnonzero((pieces.place[1] <= start) & (pieces.place[2] >= stop))[0])
        first, last = pieces.place[1:, piece].tolist()
        place = np.array([[0, 0], [first, stop], [start, last]])
        left = Pieces(place, cost.per_direction("both", place[2] - place[1], place[2]))
        seconds = cost.of_few("both", [stop - start], [stop])
        lost = pieces.seconds[:, piece] - left.seconds.sum(axis=1)
        state.move(0, [piece], left, lost.tolist(), MovedRanges([0], [start], [stop], [1], seconds))
    apart = state.load.copy()
    tasks = state.joined()
    assert sorted(zip(tasks.server.tolist(), tasks.start.tolist(), tasks.stop.tolist(), strict=True)) == [
        (0, 0, 256), (0, 768, 1024), (1, 0, 512), (1, 256, 768)
    ]  # fmt: skip
    wanted = np.stack([server_seconds(Plan(layout, tasks), cost, way) for way in ("forward", "backward")])
    np.testing.assert_allclose(state.load, wanted)
    assert state.grew_by_joining and state.load[0, 1] > 1.05 * apart[0, 1]
    np.testing.assert_allclose(state.mean, wanted.mean(axis=1))
