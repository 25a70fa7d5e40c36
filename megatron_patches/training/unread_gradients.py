"""Finds optimizers that train nothing, as they read a weight's ``grad``, but its gradient is in ``main_grad``.

torch calls a function here after every step of every optimizer. It looks at optimizers that hold weights of a trained
model of which none has a ``grad``. Megatron's optimizers are none of these: they set ``grad``, or hold other tensors.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from distca.errors import SupportError
from megatron_patches.te.fp8_weights import is_fp8

logger = logging.getLogger(__name__)

STEPS = 8
"""The steps without any change of a weight after which an unknown optimizer is reported to train nothing."""

_trained: WeakSet[DistributedDataParallel] = WeakSet()
_still: WeakKeyDictionary[Optimizer, tuple[int, torch.Tensor]] = WeakKeyDictionary()
"""The steps that changed no weight, by optimizer, and the weights' sums since then. An optimizer with ``STEPS`` or more
is not looked at any more."""
_listening: list[Any] = []


def note_gradients(model: DistributedDataParallel) -> None:
    """Notes that gradients are in the model's ``main_grad``, so that an optimizer is expected to read them."""
    if not _listening:
        _listening.append(register_optimizer_step_post_hook(_look_at))
    _trained.add(model)


def _look_at(optimizer: Optimizer, *_: Any) -> None:
    """Looks at an optimizer after its step.

    Raises:
        SupportError: it is one of torch's optimizers and trained nothing.
    """
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    for model in list(_trained):
        weights = [weight for weight in model.param_to_bucket_group if id(weight) in held and not is_fp8(weight)]
        if not weights or any(weight.grad is not None for weight in weights):
            continue
        if type(optimizer).__module__.startswith("torch.optim."):
            raise SupportError(
                f"{type(optimizer).__name__} trained nothing: it reads `grad` of each weight, and gradients of a CAD "
                "model are in `main_grad`. Take Megatron's get_megatron_optimizer; or, with "
                "CAD.data_parallel(distributed_optimizer=False), set weight.grad = weight.main_grad (in the weight's "
                "type) before every step."
            )
        _watch(optimizer, weights)


def _watch(optimizer: Optimizer, weights: list[Any]) -> None:
    """Warns of an optimizer that may read ``main_grad`` once its steps have changed nothing for a while."""
    rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
    steps, before = _still.get(optimizer, (-1, torch.empty(0)))
    if steps >= STEPS or not any(rates):  # a warm-up may begin at 0
        return
    sums = torch.stack([weight.detach().sum(dtype=torch.float64) for weight in weights]).cpu()
    if steps >= 0 and not torch.equal(sums, before):
        steps = STEPS
    _still[optimizer] = (steps + 1, sums)
    if steps + 1 == STEPS and any(bool(weight.main_grad.any()) for weight in weights) and dist.get_rank() == 0:
        logger.warning(
            "%s changed no weight in %d steps: gradients of a CAD model are in `main_grad` of each weight, and "
            "`grad` is None.",
            *(type(optimizer).__name__, STEPS),
        )
