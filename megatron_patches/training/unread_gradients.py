"""Finds optimizers that train nothing, and clipping that clips nothing, because they read ``weight.grad``.

Megatron adds gradients up in ``weight.main_grad`` and leaves ``weight.grad`` None. An optimizer of torch skips such
weights without an error. A hook after every step refuses such an optimizer, if none of the trained weights that it
holds has a ``grad``. It only warns of other optimizers than torch's, if weights stay unchanged. Megatron's own
optimizers pass, because they set ``grad``, or hold other tensors in place of the weights, such as float32 copies.

torch's functions for clipping also skip weights without ``grad``, and are refused likewise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from distca.errors import SupportError
from megatron_patches.te.fp8_weights import is_fp8

logger = logging.getLogger(__name__)

STEPS = 8
"""Rank 0 warns if an optimizer that is not from torch changes no weight in the ``STEPS`` steps after its first.

Steps with a learning rate of 0 do not count. If gradients are zero in the last of these steps, there is no warning."""

_trained: WeakSet[DistributedDataParallel] = WeakSet()
_still: WeakKeyDictionary[Optimizer, WeakKeyDictionary[Any, tuple[int, torch.Tensor]]] = WeakKeyDictionary()
"""For each watched optimizer and model: the number of steps so far without a changed weight, and each weight's sum of
elements. A number of ``STEPS`` or more means that the model is not watched any more."""
_listening: list[Any] = []
"""The handle of the hook; empty until the first model is trained."""


def note_gradients(model: DistributedDataParallel) -> None:
    """Notes that a model had a backward pass. From now on, optimizers and clipping of its weights are checked."""
    if not _listening:
        _listening.append(register_optimizer_step_post_hook(_look_at))
        for name in ("clip_grad_value_", "_clip_grads_with_norm_"):  # clip_grad_norm_ calls the second
            _check_clipping(getattr(clip_grad, name, None))
    _trained.add(model)


def _check_clipping(function: Any) -> None:
    """Makes one of torch's functions for clipping refuse weights without ``grad``.

    A script may have imported the function already, so the function itself must change. In torch 2.13 its closure holds
    one inner function, which it calls under torch.no_grad. The inner function is replaced here. A function of torch
    that is made otherwise is left alone.
    """
    closure: tuple[Any, ...] = getattr(function, "__closure__", None) or ()
    if len(closure) != 1 or not callable(closure[0].cell_contents):
        return
    inner = closure[0]
    clip: Callable[..., Any] = inner.cell_contents

    @wraps(clip)
    def checked(parameters: torch.Tensor | Iterable[torch.Tensor], *given: Any, **named: Any) -> Any:
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(_unread(held)):
            raise SupportError(
                "torch.nn.utils clipped nothing: it reads `grad` of each weight, and gradients of a CAD model are in "
                "`main_grad`. Set clip_grad in Megatron's OptimizerConfig: its optimizer clips by the norm of all "
                "ranks' gradients."
            )
        return clip(held, *given, **named)

    inner.cell_contents = checked


def _unread(held: Iterable[torch.Tensor]) -> Iterator[tuple[DistributedDataParallel, list[Any]]]:
    """Yields each model of which ``held`` has trained weights, with these weights, if none of them has a ``grad``.

    FP8 weights are left out: only Megatron's optimizers update them."""
    ids = {id(weight) for weight in held}
    for model in list(_trained):
        weights = [weight for weight in model.param_to_bucket_group if id(weight) in ids and not is_fp8(weight)]
        if weights and all(weight.grad is None for weight in weights):
            yield model, weights


def _look_at(optimizer: Optimizer, *_: Any) -> None:
    for model, weights in _unread(weight for group in optimizer.param_groups for weight in group["params"]):
        if type(optimizer).__module__.startswith("torch.optim."):
            raise SupportError(
                f"{type(optimizer).__name__} trained nothing: it reads `grad` of each weight, and gradients of a CAD "
                "model are in `main_grad`. Take Megatron's get_megatron_optimizer; or, with "
                "CAD.data_parallel(distributed_optimizer=False), set weight.grad = weight.main_grad (in the weight's "
                "type) before every step."
            )
        _watch(optimizer, _still.setdefault(optimizer, WeakKeyDictionary()), model, weights)


def _watch(
    optimizer: Optimizer, still: WeakKeyDictionary[Any, tuple[int, torch.Tensor]], model: Any, weights: list[Any]
) -> None:
    rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
    steps, before = still.get(model, (-1, torch.empty(0)))
    if steps >= STEPS or not any(rates):  # at a learning rate of 0, as in a warm-up, nothing should change
        return
    sums = torch.stack([weight.detach().sum(dtype=torch.float64) for weight in weights]).cpu()
    if steps >= 0 and not torch.equal(sums, before):
        steps = STEPS
    still[model] = (steps + 1, sums)
    if steps + 1 == STEPS and any(bool(weight.main_grad.any()) for weight in weights) and dist.get_rank() == 0:
        logger.warning(
            "%s changed no weight in %d steps: gradients of a CAD model are in `main_grad` of each weight, and "
            "`grad` is None.",
            *(type(optimizer).__name__, STEPS),
        )
