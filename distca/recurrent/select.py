"""The choice of the kernel that computes a recurrent core. A GPU's kernels are to be chosen here, behind a check of
their results."""

from __future__ import annotations

import torch

from distca.errors import SupportError
from distca.recurrent.kernel import RecurrentKernel
from distca.recurrent.recurrence import Recurrence
from distca.recurrent.reference import ReferenceRecurrence


def choose_recurrent_kernel(recurrence: Recurrence, device: torch.device | str) -> RecurrentKernel:
    """Return the kernel for ``recurrence`` on ``device``.

    Raises:
        SupportError: the device is no CPU, for which alone a kernel was held against the formula.
    """
    if torch.device(device).type != "cpu":
        raise SupportError(
            f"Recurrent layers run on CPUs only, not on {torch.device(device).type}: no kernel for it has been held "
            "against the formula yet. Train a model without recurrent layers."
        )
    return ReferenceRecurrence(recurrence)
