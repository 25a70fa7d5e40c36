"""Parity cases set up through the public API, on the gloo ranks that call this."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from distca.parity.cases import ParityCase
    from megatron_patches.api import CAD
    from megatron_patches.steps.step import Step


def on_cpu() -> None:
    """Let Megatron-Core run here; every function of a rank calls it first."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()


def ready(
    case: ParityCase,
    *,
    distributed_optimizer: bool = False,
    fuse_accumulation: bool = True,
    disaggregate: bool = True,
    frozen: tuple[str, ...] = (),
) -> tuple[CAD, DistributedDataParallel, Step]:
    """The case's CAD, its model in Megatron's DDP in float32, and its step. ``frozen``: parts of parameters' names."""
    import torch

    from distca.parity import disaggregated, unmodified
    from distca.parity.cases import case_documents

    cpu = torch.device("cpu")
    weights = {name: p.detach() for name, p in unmodified.unmodified_model(case, torch.float32).named_parameters()}
    cad, model = disaggregated.attached(
        case, torch.float32, cpu, "reference", weights, disaggregate=disaggregate, reduced=fuse_accumulation
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    ddp = cad.data_parallel(model, distributed_optimizer=distributed_optimizer)
    return cad, ddp, cad.plan_step(case_documents(case))
