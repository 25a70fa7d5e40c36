"""NCCL's kernels start beside a long attention kernel, not after it."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.attention import AttentionSpec, TaskBatch, choose_kernel
from distca.plan.kinds import AttentionKind
from distca.testing.ranks import run_ranks

TOKENS, HEADS, KV_HEADS, DIM = 65_536, 32, 8, 128
LATER_CYCLES = 10_000_000  # some 5 ms


def reduce_beside_attention(first: bool) -> tuple[float, float]:
    """Milliseconds from the start of an attention kernel until a reduction that the second rank joins during it is
    done, and until the kernel is. ``first``: NCCL's kernels have priority."""
    os.environ["TORCH_NCCL_HIGH_PRIORITY"] = str(int(first))  # every new group reads it
    group = dist.new_group()
    kernel = choose_kernel("flash4", AttentionSpec(HEADS, KV_HEADS, DIM, torch.bfloat16, torch.device("cuda")))
    batch = TaskBatch.of(*[np.array([0, TOKENS], np.int32)] * 2, "cuda")
    q = torch.randn(TOKENS, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, TOKENS, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    gradients = torch.ones(1 << 20, device="cuda")
    side = torch.cuda.Stream(priority=-1)  # what makes the second rank late must not itself wait for the kernel's end
    for _ in range(2):  # the first time compiles and connects
        dist.barrier()
        torch.cuda.synchronize()
        began, reduced, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        began.record()
        side.wait_event(began)
        kernel.forward(q, k, v, batch, AttentionKind(DIM**-0.5))
        ended.record()
        with torch.cuda.stream(side):
            if dist.get_rank() == 1:
                torch.cuda._sleep(LATER_CYCLES)
            # Only what is asynchronous runs on NCCL's own stream, as everything does that travels beside computation.
            work = dist.all_reduce(gradients, group=group, async_op=True)
            assert work is not None
            work.wait()
            reduced.record()
        torch.cuda.synchronize()
    return began.elapsed_time(reduced), began.elapsed_time(ended)


@pytest.mark.alone
@pytest.mark.parametrize("first", [True, False])
def test_a_reduction_beside_attention(first):
    """Without priority it waits for the kernel's end: the reason why there is priority."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for reduced, ended in run_ranks(2, reduce_beside_attention, first, gpus=True):
        if first:
            assert reduced < 0.5 * ended
        else:
            assert reduced > 0.8 * ended
