"""The choice of a core-attention kernel: the named one, or the fastest that can run and computes right results.

With "auto" each rank takes the fastest kernel that is right on it, so ranks on unlike GPUs may have unlike kernels. The
kernel may be a pair, which computes forward by one kernel and backward by another. A named kernel is for all ranks: if
one cannot run it, all refuse it. A candidate is first checked on this machine (self_check.py). The log says which rank
took which kernel, and why faster ones were not taken.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from distca.attention.flash4 import Flash4Kernel
from distca.attention.kernel import Kernel
from distca.attention.pair import BETWEEN, PairKernel
from distca.attention.reference import ReferenceKernel
from distca.attention.self_check import AttentionSpec, Verdict, check
from distca.attention.torch_flash import TorchFlashKernel
from distca.cluster.agreement import first_objection, of_ranks, who
from distca.errors import KernelError
from distca.sizes.head_dims import unserved_by

logger = logging.getLogger(__name__)

KernelName = Literal["auto", "flash4", "torch", "reference"]
"""The names that a user can give: "auto" for the fastest kernel that can be used, then kernels, fastest first."""
NAMES: tuple[str, ...] = get_args(KernelName)
BY_SPEED = ("flash4", "flash4+torch", "torch", "flash4+reference", "torch+reference", "reference")
"""All that "auto" may take, from the fastest to the slowest; pairs name the kernel of forward first."""
_WRONG = "its self-check refuses it, as "
"""The begin of the reason against a kernel that fails, cannot be loaded or computes wrong results."""


@dataclass(frozen=True)
class Choice:
    """The kernel that a rank takes.

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
        return self.kernel.name + self.reasons

    @property
    def reasons(self) -> str:
        """The reasons against faster kernels, in parentheses; empty without any."""
        skipped = "; ".join(f"not {name}: {why}" for name, why in self.against.items())
        return f" ({skipped})" if skipped else ""


def choose_kernel(name: str, spec: AttentionSpec, *, setting: str = "`kernel`") -> Kernel:
    """Returns the named kernel, or with "auto" the fastest that can run and computes right results on this rank.

    All ranks call it at the same time, since they exchange their reasons against a kernel.

    Args:
        name: "auto", "flash4", "torch" or "reference".
        spec: the model's kinds of attention, and this rank's heads.
        setting: the setting that has the name, for the message.

    Raises:
        KernelError: the name is unknown, or that kernel cannot run on a rank or computes wrong results there; the
            message says why. All ranks raise it.
    """
    choice = find_kernel(name, spec, setting=setting)
    slow = name == "auto" and spec.device.type == "cuda" and "reference" in choice.kernel.name
    wrong = any(_WRONG in why for why in choice.against.values())
    said = choice.kernel.name + (", which is slow" if slow else "") + choice.reasons
    everyone = of_ranks((choice.kernel.name, said, slow or wrong))
    logger.log(
        logging.WARNING if any(warns for *_, warns in everyone) else logging.INFO,
        "Core attention kernel: %s",
        _by_kernel([of_rank[:2] for of_rank in everyone]),
    )
    return choice.kernel


def _by_kernel(said: Sequence[tuple[str, str]]) -> str:
    """Returns in words which ranks take which kernel; of ranks with the same kernel the first one's words count.

    Args:
        said: by rank, the name of its kernel, and the name with reasons against faster kernels.
    """
    names = [name for name, _ in said]
    first = dict(reversed(said))
    if len(first) == 1:
        return said[0][1]
    return "; ".join(f"on {who(names, name)} {first[name]}" for name in dict.fromkeys(names))


def find_kernel(name: str, spec: AttentionSpec, *, setting: str = "`kernel`") -> Choice:
    """Does the same as :func:`choose_kernel`, with the reasons in the result and not in the log."""
    # Ranks may have different names, so all exchange their reasons equally often.
    unknown = first_objection(None if name in NAMES else f"{setting} is '{name}'; it can be {', '.join(NAMES)}")
    if unknown is not None:
        raise KernelError(f"{unknown}.")
    found = _fastest(spec) if name == "auto" else _named(name, spec)
    objection = first_objection(None if isinstance(found, Choice) else found)
    if isinstance(found, Choice) and objection is None:
        return found
    if name == "auto":
        raise KernelError(f"No kernel of core attention can run: {objection}. Run `distca doctor` on that machine.")
    raise KernelError(f"{setting} {name} cannot run here: {objection}. Set {setting} to auto to choose another.")


def _named(name: str, spec: AttentionSpec) -> Choice | str:
    """Returns the named kernel, or the reason against it on this rank; it asks no other rank."""
    objection = why_not(name, spec)
    if objection is not None:
        return objection
    kernel, verdict = _proved(name, spec)
    if kernel is None or verdict.objection is not None:
        return f"{_WRONG}{verdict.objection}"
    return Choice(kernel, verdict, {})


def _fastest(spec: AttentionSpec) -> Choice | str:
    """Returns the first of :data:`BY_SPEED` that is right on this rank; it asks no other rank.

    If the reference is wrong too, the result is the reasons against all kernels."""
    against: dict[str, str] = {}
    for name in BY_SPEED:
        objection = why_not(name, spec)
        if objection is None:
            kernel, verdict = _proved(name, spec)
            if kernel is not None and verdict.objection is None:
                return Choice(kernel, verdict, against)
            against[name] = f"{_WRONG}{verdict.objection}"
        elif BETWEEN not in name:  # what speaks against a pair is said of its kernels
            against[name] = objection
    return "; ".join(f"{name}: {why}" for name, why in against.items())


def _proved(name: str, spec: AttentionSpec) -> tuple[Kernel | None, Verdict]:
    """Makes a kernel or a pair and checks it; None for one that does not load."""
    try:
        kernels = [_make(each, spec) for each in name.split(BETWEEN)]
    except Exception as error:  # The libraries that it imports may raise errors of any kind.
        return None, Verdict(f"it cannot be loaded: {error}")
    kernel = PairKernel(*kernels) if len(kernels) > 1 else kernels[0]
    return kernel, check(kernel, spec)


def _make(name: str, spec: AttentionSpec) -> Kernel:
    if name == "flash4":
        return Flash4Kernel(spec.deterministic)
    return TorchFlashKernel() if name == "torch" else ReferenceKernel()


def why_not(name: str, spec: AttentionSpec) -> str | None:
    """Returns the reason why a kernel or a pair cannot run here, or None; it does not check results."""
    parts = name.split(BETWEEN)
    return _why_not(parts[0], spec, "forward") or _why_not(parts[-1], spec, "backward")


def _why_not(name: str, spec: AttentionSpec, direction: Literal["forward", "backward"]) -> str | None:
    """Returns the reason why one direction of a kernel cannot run here, or None."""
    if name == "reference":
        return None
    if spec.device.type != "cuda":
        return "it needs a GPU, and this rank computes on the CPU"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}"
    if name == "flash4":
        if not _installed("flash_attn.cute"):
            return "flash-attn-4 is not installed"
        if torch.cuda.get_device_capability(spec.device)[0] < 9:
            return f"{torch.cuda.get_device_name(spec.device)} is older than Hopper"
    if name == "torch" and spec.deterministic and direction == "backward":
        return "its backward is not deterministic"
    if name == "torch" and any(kind.softcap for kind in spec.kinds):
        return "it has no softcap of scores"
    return unserved_by(name, spec.head_dim, spec.value_dim, direction)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
