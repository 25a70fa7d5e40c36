"""``distca doctor``: what is installed, what automatic choices would be made here, and why not the others."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

from rich.table import Table

import distca
from distca.commands.options import check_head_dim
from distca.log import print_json, printer
from megatron_patches import versions

if TYPE_CHECKING:
    import torch

# Distribution names under which each package may be installed.
_PACKAGES = {
    "numpy": ("numpy",),
    "flash-attn-4": ("flash-attn-4",),
    "transformer-engine": ("transformer-engine",),
}


_HEADS = (8, 2)
"""Query and key/value heads of the self-check of a kernel."""


def doctor(head_dim: int = 128, json: bool = False) -> None:
    """Show versions, devices, and which kernel and transport "auto" chooses on this machine.

    On GPUs kernels and fused operations are held against their references; what compiles takes about 20 s once.

    Args:
        head_dim: head dimension that the kernel is chosen for.
        json: print what was found as JSON in place of the table.
    """
    check_head_dim(head_dim)
    sections = (_versions(), _torch(), _choices(head_dim))
    if json:
        return print_json({name: text for section in sections for name, text in section})
    table = Table(show_header=False, title="distca doctor", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section in sections:
        for name, text in section:
            table.add_row(name, text)
        table.add_section()
    printer().print(table)


def _versions() -> list[tuple[str, str]]:
    rows = [
        ("distca", distca.__version__),
        ("Python", platform.python_version()),
        ("megatron-core", versions.why_not_supported() or str(versions.installed_version())),
    ]
    return rows + [(name, _version(names)) for name, names in _PACKAGES.items()]


def _version(names: tuple[str, ...]) -> str:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name) + (f" ({name})" if len(names) > 1 else "")
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _torch() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        return [("torch", f"cannot be imported: {error}")]
    rows = [("torch", torch.__version__), ("CUDA of torch", torch.version.cuda or "none: this is a CPU build")]
    if not torch.cuda.is_available():
        return [*rows, ("GPUs", "none that torch can use")]
    rows.append(("NCCL", ".".join(str(part) for part in torch.cuda.nccl.version())))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append((f"GPU {index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    return rows


def _choices(head_dim: int) -> list[tuple[str, str]]:
    try:
        import torch

        from distca.attention import AttentionSpec
        from distca.attention.select import find_kernel
        from distca.commands.doctor_transport import transport_reasons, transport_rows
    except ImportError as error:
        return [("kernel", f"cannot be chosen: {error}")]
    rows = []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        choice = find_kernel("auto", AttentionSpec(*_HEADS, head_dim, dtype, device))
        rows.append((f"kernel in {precision}, head_dim {head_dim}", str(choice)))
        if choice.verdict.furthest:
            rows.append((f"its self-check in {precision}", f"right: {choice.verdict.furthest}"))
    if device.type == "cuda":
        rows += _operation_rows(head_dim, device)
    rows.append(("kernel of recurrent layers in bf16", _recurrent_kernel(device)))
    rows.append(("transport", _choice(transport_reasons())))
    shown = "nccl" if device.type == "cuda" else "gloo"
    rows.append(("transport beside servers without a model", shown))
    return rows + transport_rows()


def _recurrent_kernel(device: torch.device) -> str:
    """The kernel of a gated delta net with the heads of a 9B model, or why there is none."""
    import torch

    from distca.errors import SupportError
    from distca.recurrent import Recurrence, choose_recurrent_kernel

    try:
        return choose_recurrent_kernel(Recurrence.gated_delta_net(16, 32, 128, 128), device, torch.bfloat16).name
    except SupportError as error:
        return f"none: {error}"


def _operation_rows(head_dim: int, device: torch.device) -> list[tuple[str, str]]:
    """Returns the findings of the self-check of fused operations, for the sizes of an 8B model."""
    import torch

    from distca.ops.self_check import Widths, check_operations

    found = check_operations(Widths(4096, 14336, *_HEADS, head_dim, experts=True), torch.bfloat16, device)
    wrong = [f"{operation} is refused, as {why}" for operation, why in found.items() if why]
    return [("fused operations in bf16", "; ".join(wrong) or f"{', '.join(found)}: right")]


def _choice(reasons: dict[str, str | None]) -> str:
    """The first that nothing speaks against, and what speaks against those before it."""
    chosen = next(name for name, reason in reasons.items() if reason is None)
    against = [f"not {name}: {reason}" for name, reason in reasons.items() if reason]
    return chosen + (f" ({'; '.join(against)})" if against else "")
