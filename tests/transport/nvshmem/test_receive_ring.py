"""Places in receive buffer: never two exchanges in one place at a time, the same on every rank, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.errors import TransportError
from distca.transport.nvshmem.receive_ring import ReceiveRing

GIB = 2**30


@given(
    capacity=st.integers(1, 40),
    sizes=st.lists(st.lists(st.integers(0, 2000), min_size=1, max_size=3), max_size=60),
    data=st.data(),
)
def test_a_place_is_given_again_only_after_it_was_emptied(capacity, sizes, data):
    ring = ReceiveRing(capacity * 256, "THE SETTING")
    lying, under_way, taken, number = {}, [], 0, 0
    for parts in sizes:
        newest, hops = number, data.draw(st.integers(1, 2))
        number += hops
        try:
            landing = ring.place(tuple(parts), hops)
        except TransportError:
            # A refusal must be for good reason: beside the one before it, a third of the memory is always free.
            size = sum(-(-part // 256) * 256 for part in parts)
            before = lying[newest][1] - lying[newest][0] if newest else 0
            assert size > capacity * 256 or (newest and before + 3 * max(size, before) > capacity * 256)
            return
        assert landing.number == number
        ends = [landing.begin + offset + part for offset, part in zip(landing.offsets, parts, strict=True)]
        end = max(ends)
        assert landing.begin % 256 == 0 and all(offset % 256 == 0 for offset in landing.offsets)
        assert all(e <= n + landing.begin for e, n in zip(ends[:-1], landing.offsets[1:], strict=True))
        assert end <= capacity * 256
        overlapped = [n for n, (a, b) in lying.items() if a < end and landing.begin < b]
        assert landing.reuses >= max(overlapped, default=0)
        assert landing.reuses <= taken, "it would wait for rows that this rank itself has yet to consume"
        lying[number] = (landing.begin, end)
        under_way.append(number)
        while len(under_way) > 1 or (under_way and data.draw(st.booleans())):
            out = data.draw(st.sampled_from(under_way[:-1] or under_way))
            under_way.remove(out)
            taken = ring.consumed(out)
            assert taken == min(under_way, default=number + 1) - 1


@given(sizes=st.lists(st.integers(0, 3000), max_size=60), data=st.data())
def test_ranks_that_take_out_at_other_times_refuse_the_same(sizes, data):
    rings = [ReceiveRing(40 * 64, "THE SETTING") for _ in range(2)]
    late: list[list[int]] = [[], []]
    for size in sizes:
        reasons = [ring.why_not((size,)) for ring in rings]
        assert reasons[0] == reasons[1]
        places = [ring.place((size,)).number if reasons[0] is None else ring.skip() for ring in rings]
        assert places[0] == places[1]
        for ring, numbers in zip(rings, late, strict=True):
            numbers.append(places[0])
            while len(numbers) > 1 or (numbers and data.draw(st.booleans())):
                ring.consumed(numbers.pop(0))


def test_what_does_not_fit_names_the_setting_and_a_size_that_does():
    ring = ReceiveRing(GIB, "THE_SETTING")
    ring.place((GIB // 2,))
    with pytest.raises(TransportError) as error:
        ring.place((GIB * 3 // 4,))
    assert "THE_SETTING gives 1 GiB of symmetric memory per rank" in str(error.value)
    assert "an exchange of 0.75 GiB does not fit beside the exchange before it, of 0.5 GiB;" in str(error.value)
    assert "set THE_SETTING to 2.75 or more" in str(error.value)
    larger = ReceiveRing(GIB * 11 // 4, "THE_SETTING")
    larger.place((GIB // 2,))
    larger.place((GIB * 3 // 4,))


def test_an_exchange_larger_than_the_memory_is_refused_though_nothing_is_under_way():
    with pytest.raises(TransportError, match=r"an exchange of \S+ GiB does not fit; set"):
        ReceiveRing(1024, "THE_SETTING").place((2000,))


def test_the_ring_is_open_again_after_an_exchange_that_did_not_fit():
    """One of two that do not fit side by side goes another way, not all that follow."""
    ring, placed = ReceiveRing(100 * 256, "THE SETTING"), 0
    for _ in range(1000):
        fits = ring.why_not((60 * 256,)) is None
        ring.consumed(ring.place((60 * 256,)).number if fits else ring.skip())
        placed += fits
    assert placed == 500
