"""The choice of a core-attention kernel: the named one, or the fastest that can run and computes right results.

All ranks choose together and take the same kernel, once, before training. A candidate is first checked on this machine
(self_check.py). The log says which kernel was taken, and why faster ones were not.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from distca.attention.flash4 import Flash4Kernel
from distca.attention.kernel import Kernel
from distca.attention.reference import ReferenceKernel
from distca.attention.self_check import AttentionSpec, Verdict, check
from distca.attention.torch_flash import TorchFlashKernel
from distca.cluster.agreement import first_objection
from distca.errors import KernelError
from distca.sizes.head_dims import unserved_by

logger = logging.getLogger(__name__)

KernelName = Literal["auto", "flash4", "torch", "reference"]
"""The names of kernels from the fastest to the slowest, after "auto" for the fastest that can be used."""
NAMES: tuple[str, ...] = get_args(KernelName)
_WRONG = "its self-check refuses it, as "
"""The begin of the reason against a kernel that computes wrong results."""


@dataclass(frozen=True)
class Choice:
    """The kernel that all ranks take.

    Attributes:
        kernel: the kernel, which has passed its self-check.
        verdict: the result of its self-check on this rank.
        against: by name, the reasons why faster kernels were not taken.
    """

    kernel: Kernel
    verdict: Verdict
    against: Mapping[str, str]

    def __str__(self) -> str:
        """The kernel's name, and the reasons against faster ones."""
        skipped = "; ".join(f"not {name}: {why}" for name, why in self.against.items())
        return self.kernel.name + (f" ({skipped})" if skipped else "")


def choose_kernel(name: str, spec: AttentionSpec, *, setting: str = "`kernel`") -> Kernel:
    """Returns the named kernel, or with "auto" the fastest that can run and computes right results on every rank.

    All ranks call it at the same time, since they exchange their reasons against a kernel.

    Args:
        name: "auto", "flash4", "torch" or "reference".
        spec: the model's kinds of attention, and this rank's heads.
        setting: the setting that has the name, for the message.

    Raises:
        KernelError: the name is unknown, or that kernel cannot run here or computes wrong results; the message says
            why.
    """
    choice = find_kernel(name, spec, setting=setting)
    slow = choice.kernel.name == "reference" and name == "auto" and spec.device.type == "cuda"
    wrong = any(_WRONG in why for why in choice.against.values())
    logger.log(
        logging.WARNING if slow or wrong else logging.INFO,
        "Core attention kernel: %s%s%s",
        choice.kernel.name,
        ", which is slow" if slow else "",
        str(choice).removeprefix(choice.kernel.name),
    )
    return choice.kernel


def find_kernel(name: str, spec: AttentionSpec, *, setting: str = "`kernel`") -> Choice:
    """Does the same as :func:`choose_kernel`, with the reasons in the result and not in the log."""
    if name not in NAMES:
        raise KernelError(f"{setting} is '{name}'; it can be {', '.join(NAMES)}.")
    against: dict[str, str] = {}
    for candidate in NAMES[1:] if name == "auto" else (name,):
        objection = first_objection(why_not(candidate, spec))
        if objection is None:
            kernel, verdict = _proved(candidate, spec)
            objection = first_objection(verdict.objection and f"{_WRONG}{verdict.objection}")
            if objection is None:
                assert kernel is not None
                return Choice(kernel, verdict, against)
        against[candidate] = objection
    raise KernelError(f"{setting} {name} cannot run here: {against[name]}. Set {setting} to auto to choose another.")


def _proved(name: str, spec: AttentionSpec) -> tuple[Kernel | None, Verdict]:
    """Makes a kernel and checks it; None for a kernel that does not load."""
    try:
        kernel = _make(name, spec)
    except Exception as error:  # The libraries that it imports may raise errors of any kind.
        return None, Verdict(f"it cannot be loaded: {error}")
    return kernel, check(kernel, spec)


def _make(name: str, spec: AttentionSpec) -> Kernel:
    if name == "flash4":
        return Flash4Kernel(spec.deterministic)
    return TorchFlashKernel() if name == "torch" else ReferenceKernel()


def why_not(name: str, spec: AttentionSpec) -> str | None:
    """Returns the reason why a kernel cannot run here, or None; it does not check the kernel's results."""
    if name == "reference":
        return None
    if spec.device.type != "cuda":
        return "the tensors are not on a GPU"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}"
    if name == "flash4":
        if not _installed("flash_attn.cute"):
            return "flash-attn-4 is not installed"
        if torch.cuda.get_device_capability(spec.device)[0] < 9:
            return f"{torch.cuda.get_device_name(spec.device)} is older than Hopper"
    if name == "torch" and spec.deterministic:
        return "its backward is not deterministic"
    if name == "torch" and any(kind.softcap for kind in spec.kinds):
        return "it has no softcap of scores"
    return unserved_by(name, spec.head_dim, spec.value_dim)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
