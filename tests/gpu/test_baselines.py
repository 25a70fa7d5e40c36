"""Core attention of the context-parallel baselines in bfloat16, over NCCL, against direct attention in float64."""

import warnings

import pytest
import torch

from tests.gpu.starts import Case

# As for kernels: a few roundings of bfloat16. Ring attention merges partial outputs in float32.
TOLERANCE = 6e-3
KERNELS = ("flash4", "torch")
RANKS = (2, 4)


def _errors(kernel, names):
    warnings.filterwarnings("ignore")
    from distca.attention import AttentionSpec, choose_kernel
    from distca.baselines.mode import parse_mode
    from distca.plan import AttentionShape
    from tests.benchmarks.baseline_parity import attention_errors

    device = torch.device("cuda", torch.cuda.current_device())
    chosen = choose_kernel(kernel, AttentionSpec(16, 4, 128, torch.bfloat16, device))
    modes, lengths = [parse_mode(name) for name in names], [1300, 705, 1, 1501, 33, 557]
    return attention_errors(modes, lengths, AttentionShape(16, 4, 128), torch.bfloat16, device, chosen)


def cases(_):
    modes = {ranks: [f"cp{ranks}", f"cp{ranks}-keep", f"ring{ranks}", f"ulysses{ranks}"] for ranks in RANKS}
    return {f"{ranks}-{each}": Case(ranks, _errors, (each, modes[ranks])) for ranks in RANKS for each in KERNELS}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_attention(starts, ranks, kernel):
    for name, errors in starts.result(f"{ranks}-{kernel}")[0].items():
        assert max(errors.values()) < TOLERANCE, (name, errors)
