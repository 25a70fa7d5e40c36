"""The self-checks of a start on a GPU: right kernels and operations pass them, wrong ones do not."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distca.attention import AttentionSpec, KernelError, choose_kernel
from distca.attention.self_check import check
from distca.plan.kinds import AttentionKind
from distca.testing.wrong_kernels import wrong_kernels

GPU = torch.device("cuda")


def _spec(dim, **changed):
    return AttentionSpec(8, 2, dim, torch.bfloat16, GPU, **changed)


def _chosen(name, spec):
    try:
        return choose_kernel(name, spec)
    except KernelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["flash4", "torch"])
@pytest.mark.parametrize("dim", [64, 128])
def test_right_kernels_pass_with_every_seed_and_wrong_ones_with_none(name, dim):
    kernel, spec = _chosen(name, _spec(dim)), _spec(dim)
    for seed in range(5):
        found = check(kernel, spec, seed=seed)
        assert found.objection is None and found.furthest.excess < 0.7
    for how, wrong in wrong_kernels(kernel).items():
        assert check(wrong, spec).objection is not None, how


@pytest.mark.parametrize(
    "changed",
    [
        {"causal": False},
        {"deterministic": True},
        {"kinds": (AttentionKind(0.2), AttentionKind(0.2, window=100, softcap=5.0, sink=True))},
    ],
    ids=str,
)
def test_flash4_as_it_is_used(changed):
    assert _chosen("flash4", _spec(128, **changed)).name == "flash4"


def test_a_head_dimension_that_is_wrong_is_refused_by_the_check_alone():
    from distca.attention.flash4 import Flash4Kernel

    _chosen("flash4", _spec(128))
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("known on Hopper only")
    assert "for head dimension 48 d" in str(check(Flash4Kernel(), _spec(48)).objection)


@pytest.mark.parametrize("dim", [16, 40, 48, 72, 80, 104, 112])
def test_head_dimensions_that_are_right_in_forward_alone(dim):
    _chosen("flash4", _spec(128))
    kernel, spec = _chosen("auto", _spec(dim)), _spec(dim, kinds=(AttentionKind(0.2), AttentionKind(0.2, window=100)))
    assert kernel.name == "flash4+torch"
    assert all(check(kernel, spec, seed=seed).objection is None for seed in range(5))
    assert _chosen("auto", _spec(dim, deterministic=True)).name == "flash4+reference"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operations_pass_with_every_seed(dtype):
    from distca.ops import self_check

    for run in self_check._operations(
        self_check.Widths(4096, 14336, 32, 8, 128, experts=True, expert_biases=True, head_norms=True)
    ).values():
        for seed in range(5):
            assert self_check.why_wrong(run, dtype, GPU, seed) is None


@pytest.mark.parametrize("fp8", ["none", "current", "delayed", "blockwise"])
def test_transformer_engines_products_pass_and_leave_random_numbers_alone(fp8):
    from megatron_patches.te.installed import why_not_supported

    if reason := why_not_supported():
        pytest.skip(reason)
    from megatron.core import parallel_state

    from megatron_patches.te.choice import why_not_fp8
    from megatron_patches.te.quantization import config_fields
    from megatron_patches.te.self_check import check_products

    if fp8 != "none" and (reason := why_not_fp8(GPU, fp8 == "blockwise")):
        pytest.skip(reason)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        config = SimpleNamespace(
            **{"fp8": None, "fp8_recipe": "delayed", "tp_only_amax_red": False} | config_fields(fp8)
        )
        before = torch.cuda.get_rng_state()
        assert check_products(config, GPU) is None
        assert torch.equal(before, torch.cuda.get_rng_state())
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
