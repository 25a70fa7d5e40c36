"""Choose a kernel once, for all ranks, let it prove itself, say which and why, and let the user decide otherwise."""

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
from distca.cluster.verdict import first_objection
from distca.errors import KernelError
from distca.sizes.head_dims import unserved_by

logger = logging.getLogger(__name__)

KernelName = Literal["auto", "flash4", "torch", "reference"]
"""Core-attention kernels, and "auto" for the fastest that can run and is right."""
NAMES: tuple[str, ...] = get_args(KernelName)
_WRONG = "its self-check refuses it, as "


@dataclass(frozen=True)
class Choice:
    """The kernel that all ranks take.

    Attributes:
        kernel: proved for the kind of attention that was asked for.
        verdict: what its self-check found on this rank.
        against: why faster ones were not taken, by name.
    """

    kernel: Kernel
    verdict: Verdict
    against: Mapping[str, str]

    def __str__(self) -> str:
        """The name, and what speaks against those before it."""
        skipped = "; ".join(f"not {name}: {why}" for name, why in self.against.items())
        return self.kernel.name + (f" ({skipped})" if skipped else "")


def choose_kernel(name: str, spec: AttentionSpec, *, setting: str = "`kernel`") -> Kernel:
    """Return the named kernel, or with "auto" the fastest that can run here, is right, and does so on every rank. Every
    rank calls it together.

    Args:
        name: "auto", "flash4", "torch" or "reference".
        spec: the kind of attention, and this rank's heads.
        setting: where the name is from, for the message.

    Raises:
        KernelError: the name is unknown, that kernel cannot run here, or it is wrong; the message says why.
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
    """The same as :func:`choose_kernel`, with what was found on the way, and without a word in the log."""
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
    try:
        kernel = _make(name, spec)
    except Exception as error:  # of what it imports
        return None, Verdict(f"it cannot be loaded: {error}")
    return kernel, check(kernel, spec)


def _make(name: str, spec: AttentionSpec) -> Kernel:
    if name == "flash4":
        return Flash4Kernel(spec.deterministic)
    return TorchFlashKernel() if name == "torch" else ReferenceKernel()


def why_not(name: str, spec: AttentionSpec) -> str | None:
    """Why a kernel cannot run here, or None if it can; whether it is right is not asked."""
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
