"""Tensors come back from host memory as they were, what was parked last stays, and memory is used again."""

from __future__ import annotations

import weakref

import pytest
import torch

from distca.device import offload
from distca.device.offload import Offload, Parked, taken
from distca.errors import SupportError

CPU = torch.device("cpu")


def _tensor(number: int, rows: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(rows * 5, dtype=torch.float32) + 100 * number).to(dtype).view(rows, 5)


def _park(parking: Offload, numbers: range) -> tuple[list[Parked], list[weakref.ref[torch.UntypedStorage]]]:
    """What was parked, and the memory that it was in."""
    parked, memory = [], []
    for number in numbers:
        tensor = _tensor(number)
        parked.append(parking.park(tensor))
        memory.append(weakref.ref(tensor.untyped_storage()))
    return parked, memory


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [3, 0, 5, 1, 4, 2]])
@pytest.mark.parametrize("window,ahead", [(0, 0), (1, 2), (2, 1), (10, 5)])
def test_tensors_come_back_in_any_order(order: list[int], window: int, ahead: int) -> None:
    """Across the borders of chunks of host memory, too."""
    parking = Offload(CPU, window, ahead, chunk_bytes=200)
    parked, _ = _park(parking, range(6))
    for number in order:
        assert torch.equal(parked[number].take(), _tensor(number)), number
    assert torch.equal(parked[order[0]].take(), _tensor(order[0])), "once more"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_shapes_and_tensors_without_elements(dtype: torch.dtype) -> None:
    parking = Offload(CPU, window=0, ahead=0)
    tensors = [_tensor(1, dtype=dtype), _tensor(2, dtype=dtype).t(), _tensor(3, rows=0, dtype=dtype), torch.tensor(7)]
    parked = [parking.park(each) for each in tensors]
    for each, before in zip(parked, tensors, strict=True):
        after = taken(each)
        assert after.dtype == before.dtype and torch.equal(after, before)
        assert not before.numel() or after.data_ptr() != before.data_ptr()


def test_what_is_parked_leaves_the_device() -> None:
    parking = Offload(CPU, window=2, ahead=1)
    parked, memory = _park(parking, range(6))
    assert [each() is not None for each in memory] == [False] * 4 + [True] * 2
    there = parked[5].take().data_ptr()
    assert there == memory[5]().data_ptr(), "not copied back"


def test_those_before_one_that_is_taken_come_back_with_it() -> None:
    parking = Offload(CPU, window=0, ahead=2)
    parked, _ = _park(parking, range(6))
    parked[4].take()
    assert [each._entry.here is not None for each in parked] == [False, False, True, True, True, False]
    back = weakref.ref(parked[4].take().untyped_storage())
    parked[4] = parked[0]
    assert back() is None, "what was taken and let go of is not kept"


def test_a_tensor_that_is_parked_twice_is_copied_once() -> None:
    parking = Offload(CPU, window=2, ahead=0, chunk_bytes=128)
    whole = _tensor(1, rows=6)
    parked = [parking.park(each) for each in (whole, whole.view(3, 10), whole[2:5], whole.detach())]
    assert parking._memory.size == 128
    last, whole = whole[2:5].clone(), whole.clone()
    parking.park(_tensor(2)), parking.park(_tensor(3))
    assert parked[0]._entry.here is None
    assert torch.equal(parked[2].take(), last) and torch.equal(parked[1].take(), whole.view(3, 10))
    assert parked[0].take().data_ptr() == parked[3].take().data_ptr()


def test_another_tensor_in_memory_that_was_freed_is_another_one() -> None:
    parking = Offload(CPU, window=1, ahead=0)
    memory = torch.zeros(4)
    first = parking.park(memory)
    parked = parking.park(_tensor(1))
    memory.fill_(1)  # nobody else's any more
    second = parking.park(memory)
    assert torch.equal(first.take(), torch.zeros(4)) and torch.equal(second.take(), torch.ones(4))
    assert torch.equal(parked.take(), _tensor(1))


@pytest.mark.parametrize("taking", [True, False])
def test_host_memory_is_used_again_when_nothing_is_parked(taking: bool) -> None:
    """Also after a forward pass without backward."""
    parking = Offload(CPU, window=2, ahead=1, chunk_bytes=128)
    sizes = []
    for _ in range(3):
        parked, _ = _park(parking, range(5))
        for number in reversed(range(5)):
            if taking:
                assert torch.equal(parked[number].take(), _tensor(number))
            parked.pop()
        sizes.append(parking._memory.size)
    assert sizes == [5 * 128] * 3
    assert taking == (not parking._leaving)


def test_autograd_parks_what_it_saves() -> None:
    parking = Offload(CPU, window=0, ahead=0)
    x = torch.randn(4, 3, requires_grad=True)
    y = (2 * x).detach().requires_grad_()
    with parking.saved_tensors():
        z = x.exp() * y
    z.sum().backward()
    assert torch.equal(x.grad, x.exp() * y) and torch.equal(y.grad, x.exp()) and parking._memory.size


def test_too_little_host_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Offload(CPU, chunk_bytes=128)
    memory.park(_tensor(1))
    monkeypatch.setattr(offload, "free_host_memory", lambda: 127)
    parked = memory.park(_tensor(2))  # where the one was that nobody takes
    with pytest.raises(SupportError, match=r"GiB in host memory and needs .* more, but .* are free"):
        memory.park(_tensor(3))
    assert torch.equal(parked.take(), _tensor(2))
