"""What arrives once a rank of the pool is gone."""

from types import SimpleNamespace

import pytest
import torch

from distca.transport.breakable import BreakableTransport

LOST = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")


def failing(error: RuntimeError, goes_on: bool = True) -> BreakableTransport:
    def launch(_: object) -> None:
        raise error

    transport = BreakableTransport(goes_on)
    transport._inner, transport.broken = SimpleNamespace(launch=launch), False  # type: ignore[assignment]
    return transport


def test_zeros_arrive_once_a_rank_is_gone() -> None:
    transport, part = failing(LOST), SimpleNamespace(destination=torch.full((3, 2), float("nan")))
    transport.launch((part,)).wait()  # type: ignore[arg-type]
    assert transport.broken and not part.destination.any()
    part.destination.fill_(1.0)
    transport.launch((part,)).wait()  # type: ignore[arg-type]
    assert not part.destination.any()


@pytest.mark.parametrize("error, goes_on", [(RuntimeError("out of memory"), True), (LOST, False)])
def test_other_errors_are_raised_and_where_a_step_does_not_go_on_all(error: RuntimeError, goes_on: bool) -> None:
    transport = failing(error, goes_on)
    with pytest.raises(RuntimeError, match=str(error)[-10:]):
        transport.launch(())
    assert not transport.broken
