import numpy as np
import pytest
import torch

from distca.plan import AttentionKind, AttentionShape
from distca.profile import timing
from distca.profile.timing import EndedEarlyError, Samples, TimedServer, route_of_tasks
from tests.profile.machine import PretendMachine, true_backward, true_forward


def test_route_of_tasks_has_their_borders():
    route = route_of_tasks(np.array([3, 5, 1]), np.array([7, 5, 4]), AttentionKind(1.0), torch.device("cpu"))
    assert route.batches[0].batch.borders_q.tolist() == [0, 3, 8, 9]
    assert route.batches[0].batch.borders_kv.tolist() == [0, 7, 12, 16]
    assert (route.q_rows, route.kv_rows) == (9, 16)
    assert not route.repeats


def test_every_batch_is_timed_as_often_as_asked_and_as_what_it_is(monkeypatch):
    machine = PretendMachine()
    monkeypatch.setattr(timing, "Clock", lambda device: machine)
    cpu, sizes, rounds = torch.device("cpu"), [([16], [16]), ([32, 16], [64, 48]), ([48], [96])], [1, 4, 2]
    routes = [route_of_tasks(np.array(q), np.array(kv), AttentionKind(1.0), cpu) for q, kv in sizes]
    server = TimedServer(machine, AttentionShape(2, 1, 8, 4), cpu, torch.float32, q_rows=48, kv_rows=112)
    advanced = []
    taken = server.samples(routes, rounds, warm_up_s=1e-3, advance=lambda: advanced.append(1))
    assert len(advanced) == sum(rounds)
    for (q, kv), count, each in zip(sizes, rounds, taken, strict=True):
        np.testing.assert_allclose(each.forward, np.full(count, true_forward(np.array(q), np.array(kv)).sum()))
        np.testing.assert_allclose(each.backward, np.full(count, true_backward(np.array(q), np.array(kv)).sum()))


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_what_ends_early_keeps_its_rounds_once_every_batch_was_timed(monkeypatch, runs):
    machine, advanced = PretendMachine(), []
    monkeypatch.setattr(timing, "Clock", lambda device: machine)

    def end():
        advanced.append(1)
        if len(advanced) == runs:
            raise EndedEarlyError

    cpu = torch.device("cpu")
    routes = [route_of_tasks(np.array([q]), np.array([q]), AttentionKind(1.0), cpu) for q in (16, 32, 48)]
    server = TimedServer(machine, AttentionShape(2, 1, 8, 4), cpu, torch.float32, q_rows=48, kv_rows=48)
    if runs < len(routes):
        with pytest.raises(EndedEarlyError):
            server.samples(routes, [4, 4, 4], warm_up_s=0.0, advance=end)
        return
    taken = server.samples(routes, [4, 4, 4], warm_up_s=0.0, advance=end)
    assert sum(len(each.forward) for each in taken) == runs == len(advanced)
    for q, each in zip((16, 32, 48), taken, strict=True):
        np.testing.assert_allclose(each.forward, true_forward(np.array([q]), np.array([q])).sum())


def test_median_and_noise_of_samples():
    samples = Samples(np.array([1.0, 4.0, 2.0]), np.array([3.0]))
    assert samples.median("forward") == 2.0 and samples.median("backward") == 3.0
    assert samples.noise("forward") == pytest.approx(np.log(2.0))
    assert samples.noise("backward") == 0.0
