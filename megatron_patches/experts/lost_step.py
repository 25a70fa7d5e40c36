"""Undoes a step's changes to the counts of experts' rows, before ``distca.CAD`` repeats the step.

A step is repeated if a *server without a model*, a process that only computes attention, is lost. By then the step may
have changed gradients and counts. The repetition sets gradients to zero, but not counts. Counts are in routers' buffers
and in ``model.expert_load``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_patches.experts.layer import BalancedRouter


def remember(model: LanguageModule) -> Callable[[], None]:
    """Copies the routers' buffers, and returns a function that restores them and ``model.expert_load``.

    The model must be attached to ``distca.CAD``.
    """
    routers = [module for module in model.modules() if isinstance(module, BalancedRouter)]
    buffers = [(router, name, each.clone()) for router in routers for name, each in router.named_buffers()]
    load, total = model.expert_load, model.expert_load.total

    def put_back() -> None:
        load.total = total
        with torch.no_grad():
            for router, name, before in buffers:
                router.get_buffer(name).copy_(before)

    return put_back
