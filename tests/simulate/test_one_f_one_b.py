import numpy as np
import pytest

from distca.simulate import one_f_one_b


@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (1, 3), (4, 2), (8, 4), (3, 5)])
def test_equal_passes_take_as_long_as_counted(micro_batches: int, stages: int):
    shape = (micro_batches, stages, 2)
    passes = one_f_one_b.run(np.full(shape, 1.0), np.full(shape, 2.0), np.zeros((micro_batches, 2)))
    assert max(each.end.max() for each in passes) == pytest.approx(3.0 * (micro_batches + stages - 1))
    for direction in ("forward", "backward"):
        done = {(each.stage, each.micro_batch) for each in passes if each.direction == direction}
        assert len(done) == micro_batches * stages
    for stage in range(stages):
        alive = most = 0
        for direction, _ in one_f_one_b.order(stage, stages, micro_batches):
            alive += 1 if direction == "forward" else -1
            most = max(most, alive)
        assert most == min(stages - stage, micro_batches)


def test_a_slow_micro_batch_stalls_every_stage_of_its_lane_only():
    forward = np.ones((4, 2, 2))
    forward[1, :, 0] = 5.0
    passes = one_f_one_b.run(forward, np.ones((4, 2, 2)), np.full((4, 2), 0.5))
    first, second = max((each.end for each in passes), key=lambda end: end[0])
    assert first > second + 4
    for each in passes:
        if each.direction == "forward" and each.stage == 1:
            sent = next(o for o in passes if (o.stage, o.micro_batch, o.direction) == (0, each.micro_batch, "forward"))
            assert (each.start >= sent.end + 0.5).all()
