"""The replay of a recorded step finds what was alive at its peak."""

GIB = 2**30


def _event(action, address, gib, line=0):
    frames = [
        {"filename": "/site/torch/nn/functional.py", "line": 1, "name": "linear"},
        {"filename": "/project/layer.py", "line": line, "name": "forward"},
    ]
    return {"action": action, "addr": address, "size": gib * GIB, "frames": frames}


def test_what_is_alive_at_the_peak_by_place():
    from benchmarks.peak_memory import at_peak

    events = [
        _event("alloc", 1, 2, 10),
        _event("alloc", 2, 3, 20),
        _event("free_requested", 2, 3),  # still in use on another stream
        _event("alloc", 3, 1, 10),  # the peak: 6
        _event("free_completed", 2, 3),
        _event("alloc", 2, 2, 30),  # another block at the same address
        _event("free_completed", 9, 50),  # from before the recording
        _event("free_completed", 1, 2),
    ]
    assert at_peak(events) == [(3.0, 2, "layer.py:10 forward"), (3.0, 1, "layer.py:20 forward")]
