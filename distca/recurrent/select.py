"""The choice of the kernel for recurrent cores (linear attention, SSM): the reference on CPUs, fla-core's on GPUs.

A kernel for GPUs is first checked against the reference (self_check.py). All ranks choose together, once for each
recurrence, and the choice is logged.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from importlib import metadata

import torch

from distca.cluster.agreement import first_objection
from distca.errors import SupportError
from distca.ops.triton import refuse
from distca.plan.recurrence import Recurrence
from distca.recurrent.fla_delta_rule import FlaDeltaRule
from distca.recurrent.kernel import RecurrentKernel
from distca.recurrent.reference import ReferenceRecurrence
from distca.recurrent.self_check import check, check_rows
from distca.recurrent.tuned import use_tuned

logger = logging.getLogger(__name__)

FLA_CORE = "0.6.0"
"""The version of fla-core that is used. Private functions of it are called, so another version is refused."""


def choose_recurrent_kernel(
    recurrence: Recurrence,
    device: torch.device | str,
    dtype: torch.dtype,
    deterministic: bool = False,
) -> RecurrentKernel:
    """Returns the kernel for ``recurrence`` on ``device``: the reference on a CPU, fla-core's on a GPU.

    All ranks call it at the same time, since they exchange their reasons against a kernel.

    Args:
        recurrence: the formula, and this rank's heads.
        device: this rank's device.
        dtype: dtype of q, k and v.
        deterministic: whether two runs must be bitwise equal.

    Raises:
        SupportError: no kernel can run on the GPU and computes right results; the message says why.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return ReferenceRecurrence(recurrence)
    if deterministic:
        raise SupportError(
            "`deterministic` is True, but kernels of recurrent layers are tuned by time at each start, and another "
            "choice rounds otherwise: set `deterministic` to False."
        )
    return _proved(recurrence, device, dtype)


@cache
def _proved(recurrence: Recurrence, device: torch.device, dtype: torch.dtype) -> RecurrentKernel:
    """Returns the first kernel that passes its check: fla-core's as it is, then with gradients within chunks of ours.

    The latter may come from a Triton kernel, or, if this fails the check, from products of torch."""
    objection = first_objection(why_not(recurrence, dtype))
    against: list[str] = []
    if objection is None:
        use_tuned(device, max(recurrence.key_dim, recurrence.value_dim))
        logger.info("Kernels of recurrent layers are compiled and checked; a first start takes a minute or more.")
    for own_gradients in (False, True) if objection is None else ():
        kernel = FlaDeltaRule(recurrence, own_gradients)
        objection = first_objection(check(kernel, recurrence, dtype, device))
        if objection is not None and own_gradients:
            refuse("gradients within chunks")
            logger.warning("The kernel of gradients within chunks is refused, and torch's products run: %s.", objection)
            objection = first_objection(check(kernel, recurrence, dtype, device))
        if objection is None:
            _prove_rows(recurrence, device, dtype)
            skipped = f" ({'; '.join(against)})" if against else ""
            logger.info("Kernel of recurrent layers: %s%s", kernel.name, skipped)
            return kernel
        against.append(f"not {kernel.name}: its self-check refuses it, as {objection}")
    raise SupportError(
        f"Recurrent layers cannot run on {device.type}, as {'; '.join(against) or objection}. Run on CPUs, or train a "
        "model without recurrent layers."
    )


def _prove_rows(recurrence: Recurrence, device: torch.device, dtype: torch.dtype) -> None:
    """Checks the Triton kernels of the convolution. If they are wrong on any rank, torch computes it on all ranks."""
    objection = first_objection(check_rows(recurrence, dtype, device))
    if objection is not None:
        refuse("convolution")
        logger.warning("The fused convolution is refused, and torch's own runs, more slowly: %s.", objection)


def why_not(recurrence: Recurrence, dtype: torch.dtype) -> str | None:
    """Returns the reason why fla-core's kernels cannot run, as a part of a sentence, or None; it checks no results."""
    if importlib.util.find_spec("fla") is None:
        return f"fla-core is not installed: install distca[recurrent], which has fla-core {FLA_CORE}"
    if _version() != FLA_CORE:
        return f"fla-core is {_version()}, whose inner functions are not known: install fla-core {FLA_CORE}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"fla's kernels take float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not recurrence.delta:
        return "the gated delta rule alone was held against the formula there, and this is another recurrence"
    if max(recurrence.key_dim, recurrence.value_dim) > 256:
        return f"fla's kernels take heads up to 256, not {max(recurrence.key_dim, recurrence.value_dim)}"
    return None


def _version() -> str:
    """The version of fla-core."""
    try:
        return metadata.version("fla-core")
    except metadata.PackageNotFoundError:  # It is not installed as a package, but its sources are on the path.
        import fla

        return str(getattr(fla, "__version__", "of an unknown version"))
