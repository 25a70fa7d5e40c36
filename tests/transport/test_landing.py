"""Places in landing memory: never two exchanges in one place at a time, the same on every rank, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.transport.landing import LandingRing
from distca.transport.transport import TransportError

GIB = 2**30


@given(
    capacity=st.integers(1, 40),
    sizes=st.lists(st.lists(st.integers(0, 2000), min_size=1, max_size=3), max_size=60),
    data=st.data(),
)
def test_a_place_is_given_again_only_after_it_was_emptied(capacity, sizes, data):
    ring = LandingRing(capacity * 256, "THE SETTING")
    lying, under_way, taken = {}, [], 0
    for number, parts in enumerate(sizes, 1):
        try:
            landing = ring.place(tuple(parts))
        except TransportError:
            # A refusal must be for good reason: with nothing under way, whatever fits alone is taken.
            assert under_way or sum(-(-part // 256) * 256 for part in parts) > capacity * 256
            return
        assert landing.number == number
        ends = [landing.begin + offset + part for offset, part in zip(landing.offsets, parts, strict=True)]
        end = max(ends)
        assert landing.begin % 256 == 0 and all(offset % 256 == 0 for offset in landing.offsets)
        assert all(e <= n + landing.begin for e, n in zip(ends[:-1], landing.offsets[1:], strict=True))
        assert end <= capacity * 256
        overlapped = [n for n, (a, b) in lying.items() if a < end and landing.begin < b]
        assert landing.reuses >= max(overlapped, default=0)
        assert landing.reuses <= taken, "it would wait for rows that this rank itself has yet to take out"
        lying[number] = (landing.begin, end)
        under_way.append(number)
        while under_way and data.draw(st.booleans()):
            out = data.draw(st.sampled_from(under_way))
            under_way.remove(out)
            taken = ring.taken(out)
            assert taken == min(under_way, default=number + 1) - 1


def test_what_does_not_fit_names_the_setting_and_a_size_that_does():
    ring = LandingRing(GIB, "THE_SETTING")
    ring.place((GIB // 2,))
    with pytest.raises(TransportError) as error:
        ring.place((GIB * 3 // 4,))
    assert "THE_SETTING gives 1 GiB of symmetric memory per rank" in str(error.value)
    assert "an exchange of 0.75 GiB does not fit beside 1 under way; set THE_SETTING to 2.75 or more" in str(
        error.value
    )
    larger = LandingRing(GIB * 11 // 4, "THE_SETTING")
    larger.place((GIB // 2,))
    larger.place((GIB * 3 // 4,))


def test_an_exchange_larger_than_the_memory_is_refused_though_nothing_is_under_way():
    with pytest.raises(TransportError, match="does not fit beside 0 under way"):
        LandingRing(1024, "THE_SETTING").place((2000,))
