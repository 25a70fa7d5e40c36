"""Two hops between two ranks, by collectives and by one-sided writes; tests/gpu/test_two_hops.py has them on GPUs."""

import torch.distributed as dist

from distca.testing.ranks import run_ranks
from distca.transport.collective import CollectiveTransport
from distca.transport.nvshmem.transport import OneSidedTransport
from tests.transport.nvshmem.host_fabric import HostFabric
from tests.transport.two_hops import count_wrong


def _wrong() -> tuple[int, int]:
    one_sided = OneSidedTransport(HostFabric(1 << 23), "host")
    return count_wrong(CollectiveTransport(dist.group.WORLD), "cpu"), count_wrong(one_sided, "cpu")


def test_rows_come_back_and_gradients_are_added_on_the_way() -> None:
    assert run_ranks(2, _wrong) == [(0, 0)] * 2
