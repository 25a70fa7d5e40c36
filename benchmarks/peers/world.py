"""This process's place among the ranks, and Megatron-Core as it is."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from distca.cluster.environment import check_gpus_usable, gpu_of, launched
from distca.cluster.process import end_with_torchrun
from distca.cluster.world import World, initialize
from distca.transport.collective import nccl_goes_first

APEX = "fused_weight_gradient_mlp_cuda"


def join_unmodified() -> World:
    """Does what ``distca.join_world`` does, without a part of Megatron-Core replaced, unless ranks are CPUs.

    Raises:
        LaunchError: the launcher's variables cannot be meant so, or GPUs are meant that torch cannot use.
    """
    end_with_torchrun()
    told = launched()
    check_gpus_usable(torch.cuda.is_available(), torch.__version__)
    if torch.cuda.is_available():
        device = torch.device("cuda", gpu_of(told.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        stand_in_for_apex()
        nccl_goes_first()
        initialize(told, "cpu:gloo,cuda:nccl", device)
    else:
        from benchmarks.peers.on_cpus import use_cpus

        device = torch.device("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # once per module, that CUDA libraries are missing
            use_cpus()
        initialize(told, "gloo")
    return World(told.rank, told.size, device)


def stand_in_for_apex() -> None:
    """Put torch's product in the place of Apex's, which adds up weight gradients, where Apex is not installed.

    Megatron-Core's output layer calls that CUDA extension, which NVIDIA's containers have, and refuses
    ``gradient_accumulation_fusion`` without it, for Transformer Engine's layers too. To be called before Megatron-Core
    is imported.
    """
    if APEX not in sys.modules and find_spec(APEX) is None:
        module: Any = ModuleType(APEX)
        module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = _add_product
        sys.modules[APEX] = module


def _add_product(rows: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    """total += gradientᵀ rows, without rounding the product before it is added where torch has such a product."""
    from distca.ops.output_loss import add_product

    add_product(total, gradient.t(), rows)
