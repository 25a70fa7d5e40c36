"""Undoes changes of a step in a model with experts, before the step is repeated.

Some ranks may have no part of the model and only compute attention for others. If such a rank is lost during a step,
the step runs to its end on wrong numbers, and is repeated. The second run sets gradients to zero first. Routers have
other numbers that a step changes: biases of experts, and counts of rows. Here these get their values from before the
step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_patches.experts.layer import BalancedRouter


def remember(model: LanguageModule) -> Callable[[], None]:
    """Copies the routers' buffers and notes the log's counts of rows; returns a function that puts both back.

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
