"""Collections happen where they are asked for and nowhere else."""

import gc
import time
import weakref

from distca.train.run.garbage import SteadyGarbage


class _Knot:
    def __init__(self):
        self.itself = self


def test_collects_only_when_asked():
    gc.collect()
    immortal = gc.get_freeze_count()  # which Python 3.12 sets aside by itself
    with SteadyGarbage() as garbage:
        garbage.collect()
        aside = gc.get_freeze_count()
        assert aside > immortal
        knot = weakref.ref(_Knot())
        rubbish = [[] for _ in range(10_000)]  # would start an automatic collection several times
        assert knot() is not None
        garbage.collect()
        assert knot() is None
        began = time.perf_counter()
        garbage.collect()
        frozen = time.perf_counter() - began
        assert gc.get_freeze_count() <= aside, "what a later step made would never be collected"
    began = time.perf_counter()
    gc.collect()
    assert frozen < time.perf_counter() - began
    assert len(rubbish) == 10_000
    assert gc.isenabled() and gc.get_freeze_count() <= immortal


def test_automatic_collection_returns_after_an_error():
    try:
        with SteadyGarbage():
            raise KeyError
    except KeyError:
        assert gc.isenabled()
