import numpy as np

from distca.plan import Tasks


def test_touching_ranges_on_one_server_are_joined() -> None:
    tasks = Tasks.sorted(*np.array([[0, 0, 0, 1], [4, 0, 6, 0], [6, 4, 9, 3], [1, 1, 0, 1]]))
    assert tasks.document.tolist() == [0, 0, 1]
    assert tasks.start.tolist() == [6, 0, 0]
    assert tasks.stop.tolist() == [9, 6, 3]
    assert tasks.server.tolist() == [0, 1, 1]


def test_the_last_task_of_a_document_on_its_server() -> None:
    tasks = Tasks.sorted(*np.array([[0, 1, 0, 1], [0, 2, 6, 0], [4, 5, 9, 1], [0, 0, 0, 1]]))
    assert tasks.server.tolist() == [0, 0, 0, 1]
    assert tasks.last_on_server.tolist() == [False, True, True, True]


def test_no_tasks() -> None:
    none = Tasks.sorted(*np.zeros((4, 0), np.int64))
    assert len(none) == 0
    assert len(none.last_on_server) == 0
