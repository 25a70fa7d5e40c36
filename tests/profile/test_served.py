import numpy as np
import torch

from distca.profile.served import route_of_tasks


def test_route_of_tasks_has_their_borders():
    route = route_of_tasks(np.array([3, 5, 1]), np.array([7, 5, 4]), torch.device("cpu"))
    assert route.batch.borders_q.tolist() == [0, 3, 8, 9]
    assert route.batch.borders_kv.tolist() == [0, 7, 12, 16]
    assert (route.q_rows, route.kv_rows) == (9, 16)
    assert not route.repeats
