"""Undoes what a step that has to be repeated changed in a model with experts.

A step during which a server without a model left runs to its end, on wrong numbers, and is then repeated. The gradients
of the first run are set to zero by the second one. Two things beside gradients outlast a step, and are put back here:

- the routers' buffers: biases of experts, which the end of a step moves, and the rows that each expert got;
- the counts of rows for the log.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_patches.experts.layer import BalancedRouter


def remember(model: LanguageModule) -> Callable[[], None]:
    """Copies what a step changes in an attached model beside gradients; returns a function that puts the copies back.

    In a model without experts there is nothing to copy."""
    routers = [module for module in model.modules() if isinstance(module, BalancedRouter)]
    buffers = [(router, name, each.clone()) for router in routers for name, each in router.named_buffers()]
    load, total = model.expert_load, model.expert_load.total

    def put_back() -> None:
        load.total = total
        with torch.no_grad():
            for router, name, before in buffers:
                router.get_buffer(name).copy_(before)

    return put_back
