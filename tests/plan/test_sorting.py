import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca.plan.sorting import expand, in_turns, merged, order_by


@given(st.data(), st.integers(1, 4), st.integers(0, 60), st.sampled_from((3, 1000, 2**40, 2**60)))
def test_sorts_like_lexsort_also_where_keys_do_not_fit_into_one_number(
    data: st.DataObject, keys: int, rows: int, most: int
) -> None:
    columns = [
        np.array(data.draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows)), np.int64) for _ in range(keys)
    ]
    assert order_by(*columns).tolist() == np.lexsort(columns[::-1]).tolist()


@given(*(st.lists(st.integers(0, 20)) for _ in range(2)))
def test_merging_two_sorted_lists_keeps_every_value_once(first: list[int], second: list[int]) -> None:
    found = merged(*(np.array(sorted(each), np.int64) for each in (first, second)))
    assert found.tolist() == sorted({*first, *second})


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))))
def test_ranges_become_their_numbers(ranges: list[tuple[int, int]]) -> None:
    begin, count = np.array(ranges, np.int64).reshape(-1, 2).T
    assert expand(begin, count).tolist() == [number for first, rows in ranges for number in range(first, first + rows)]


@given(st.integers(0, 60), st.integers(1, 9))
def test_turns_have_every_index_once_and_parts_have_some_of_all_sizes(count: int, turns: int) -> None:
    found = in_turns(count, turns)
    assert sorted(found.tolist()) == list(range(count))
    assert all((np.diff(found[found % turns == turn]) == turns).all() for turn in range(turns))
    assert (np.diff(found % turns) >= 0).all()
