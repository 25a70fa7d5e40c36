"""Two hops between two GPUs: right beside computation, queued without the host, hidden behind what the GPU does."""

import time

import pytest
import torch
import torch.distributed as dist

from distca.testing.ranks import run_ranks
from distca.transport import Part, choose_transport
from distca.transport.select import why_not_nvshmem
from tests.gpu.starts import Case
from tests.transport.two_hops import WIDTH, count_wrong, moves_of

ROWS = 1 << 18  # 128 MiB in each hop
CYCLES = 60_000_000  # some 30 ms, longer than both hops take


def _wrong(name: str) -> int:
    transport = choose_transport(name, dist.group.WORLD, 1.0)
    return sum(count_wrong(transport, "cuda", lambda: torch.cuda._sleep(100_000)) for _ in range(20))


def _two_hops(name: str) -> dict[str, float]:
    wrong = _wrong(name)
    transport = choose_transport(name, dist.group.WORLD, 1.0)
    source = torch.randn(ROWS * dist.get_rank(), WIDTH, device="cuda").bfloat16()
    there, _ = moves_of(dist.get_rank(), ROWS, ROWS, "cuda")
    alone = min(_exchange_ms(transport, source, there, 0)["waited"] for _ in range(5))
    beside = min((_exchange_ms(transport, source, there, CYCLES) for _ in range(5)), key=lambda each: each["waited"])
    return {"wrong": wrong, "alone": alone, **beside}


def _exchange_ms(transport, source, moves, cycles: int) -> dict[str, float]:
    """Milliseconds that the GPU waits for an exchange beside so many cycles of other work, that this work takes, and
    that the host takes to queue it all."""
    destination = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    dist.barrier(device_ids=[torch.cuda.current_device()])
    torch.cuda.synchronize()
    started, computed, joined = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    began = time.perf_counter()
    started.record()
    handle = transport.launch((Part(source, destination, moves),))
    if cycles:
        torch.cuda._sleep(cycles)
    computed.record()
    handle.wait()
    joined.record()
    host = (time.perf_counter() - began) * 1e3
    torch.cuda.synchronize()
    return {"waited": computed.elapsed_time(joined), "computed": started.elapsed_time(computed), "host": host}


def cases(_):
    return {"test_two_hops_over_nccl_are_right": Case(2, _wrong, ("nccl",))}


def test_two_hops_over_nccl_are_right(starts) -> None:
    assert starts.result("test_two_hops_over_nccl_are_right") == [0, 0]


@pytest.mark.alone
@pytest.mark.parametrize("name", ["nccl", "nvshmem"])
def test_two_hops_are_right_and_hide_behind_computation(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    if name == "nvshmem" and why_not_nvshmem() is not None:
        pytest.skip(f"no NVSHMEM: {why_not_nvshmem()}")
    for found in run_ranks(2, _two_hops, name, timeout=300, gpus=True):
        assert found["wrong"] == 0
        assert found["host"] < found["computed"] / 2, found  # else it waited for the GPU
        # What is left is putting the last hop's rows in their places.
        assert found["waited"] < found["alone"] / 2, found
