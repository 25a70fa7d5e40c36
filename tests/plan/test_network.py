import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.errors import PlanError
from distca.plan import Layout, Links
from distca.plan.scheduler.state import HeldRows
from tests.plan.cases import home_rows, layouts


@given(st.data(), layouts(), st.integers(0, 3))
def test_held_rows_are_those_of_the_tensors(data: st.DataObject, found: tuple[Layout, ...], per_node: int) -> None:
    layout = data.draw(st.sampled_from(found))
    node = Links(per_node).nodes(layout.ranks)
    held = HeldRows(layout.kv, node)
    rows = home_rows(layout, "kv")
    for document in np.flatnonzero(layout.last > layout.first).tolist():
        stop = data.draw(st.integers(0, int(layout.last[document])))
        has = np.array([((tensor[:, 0] == document) & (tensor[:, 1] < stop)).sum() for tensor in rows])
        near = np.array([has[node == each].sum() for each in node])
        for rank in range(layout.ranks):
            stops = np.array([[stop], [0]])
            assert held.missing(document, np.array([rank]), stops).tolist() == [stop - has[rank], 0]
            priced = (near - has + 7 * (stop - near))[rank]
            assert held.missing(document, np.array([rank]), stops, 7.0).tolist() == [priced, 0]
        together = held.missing(document, np.arange(layout.ranks), np.full((1, layout.ranks), stop))
        assert together.tolist() == [(stop - has).sum()]


def test_nodes() -> None:
    assert Links().nodes(3).tolist() == [0, 0, 0]
    assert Links(2).nodes(5).tolist() == [0, 0, 1, 1, 2]
    with pytest.raises(PlanError, match="ranks_per_node is -1"):
        Links(-1)
    with pytest.raises(PlanError, match="network_price is 0"):
        Links(8, 0.5)
