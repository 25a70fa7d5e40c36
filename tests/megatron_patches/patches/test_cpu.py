"""Torch on CPUs, where Megatron-Core asks for CUDA."""

import torch

from distca.testing.ranks import run_ranks


def _devices() -> tuple[str, str]:
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    with torch.device("meta"):
        return torch.empty(1).device.type, torch.arange(2, device="cuda").device.type


def test_a_device_as_a_context_has_its_effect() -> None:
    """Otherwise transformers loads models whose rotary frequencies have no values."""
    assert run_ranks(1, _devices) == [("meta", "cpu")]
