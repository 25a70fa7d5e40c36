"""The part of ``distca doctor`` on moving rows: libraries, links between GPUs, other machines."""

from __future__ import annotations

import ctypes
import re
from importlib import metadata
from pathlib import Path

import torch

_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED


def transport_rows() -> list[tuple[str, str]]:
    """(name, finding) for the table; asks no other process."""
    from distca.transport import cuda_ops

    rows = [("CUDA library of csrc/", cuda_ops.why_not() or "built and working"), ("NVSHMEM", _nvshmem())]
    if torch.cuda.is_available():
        rows += [("driver", _driver()), ("peer access", _peer_access()), ("NVLink", _nvlink())]
        rows.append(("several machines", _network()))
    return rows


def transport_reasons() -> dict[str, str | None]:
    """Why each transport would not be taken on one machine, or None; best first."""
    from distca.transport.select import why_no_peer_access, why_not_nvshmem

    nccl = None
    if not torch.cuda.is_available():
        nccl = "it moves GPU memory, and torch finds no GPU here"
    elif not torch.distributed.is_nccl_available():
        nccl = "this build of torch has no NCCL"
    nvshmem = why_not_nvshmem() or why_no_peer_access()
    return {"nvshmem": nvshmem, "nccl": nccl, "gloo": None}


def _nvshmem() -> str:
    """Versions of nvshmem4py and of the library that it loads, and whether they fit torch's CUDA."""
    found = {name: _version(name) for name in ("nvshmem4py-cu13", "nvshmem4py-cu12")}
    installed = {name: version for name, version in found.items() if version}
    if not installed:
        return "nvshmem4py is not installed"
    name, version = next(iter(installed.items()))
    text = f"{name} {version}"
    try:
        import nvshmem.core

        text += f", host library {nvshmem.core.get_version().libnvshmem_version}"
    except Exception as error:  # whatever keeps it from loading is what the reader wants to know
        return f"{text}, which does not load: {error}"
    text += "; its device library is not used"
    built_for, torch_cuda = name.rpartition("cu")[2], (torch.version.cuda or "").partition(".")[0]
    if torch_cuda and built_for != torch_cuda:
        text += f". It is built for CUDA {built_for}, torch for CUDA {torch_cuda}: install nvshmem4py-cu{torch_cuda}"
    return text


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    version = re.search(r"\s(\d+\.\d+[.\d]*)\s", path.read_text()) if path.is_file() else None
    found = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    supported = (found.value // 1000, found.value % 1000 // 10)
    text = f"{version.group(1) if version else 'version unknown'}, up to CUDA {supported[0]}.{supported[1]}"
    needed = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if supported < needed:
        text += f"; torch is built for CUDA {torch.version.cuda}: update the driver"
    return text


def _peer_access() -> str:
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a}→{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not pairs:
        return "one GPU"
    return "between all GPUs" if not without else f"missing {', '.join(without)}: rows go by NCCL"


def _nvlink() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        counts = []
        for index in range(torch.cuda.device_count()):
            handle, active = pynvml.nvmlDeviceGetHandleByIndex(index), 0
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                try:
                    active += pynvml.nvmlDeviceGetNvLinkState(handle, link)
                except pynvml.NVMLError:
                    break
            counts.append(active)
    except Exception as error:
        return f"unknown: {error}"
    return "none" if not any(counts) else f"{', '.join(map(str, counts))} active links per GPU"


def _network() -> str:
    """Returns, in words, the ways for rows between machines."""
    from distca.transport.select import BETWEEN_NODES

    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if not devices:
        return f"{BETWEEN_NODES}. No InfiniBand or RoCE device here: NCCL goes over TCP, NVSHMEM cannot"
    return f"{BETWEEN_NODES}. Devices: {', '.join(devices)}; {_remote_transports()}; {_gpu_direct()}"


def _remote_transports() -> str:
    """Returns, in words, the networks to other machines that NVSHMEM's package has libraries for.
    NVSHMEM_REMOTE_TRANSPORT chooses one."""
    names = {
        match.group(1)
        for package in ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
        for file in _files(package)
        if (match := re.fullmatch(r"nvshmem_transport_(\w+)\.so[.\d]*", file))
    }
    if not names:
        return "NVSHMEM's package with its libraries for networks was not found"
    return f"NVSHMEM has libraries for {', '.join(sorted(names))}"


def _gpu_direct() -> str:
    """Whether network cards can reach GPU memory."""
    ways = []
    if Path("/sys/module/nvidia_peermem").exists():
        ways.append("nvidia_peermem")
    if _exports_dma_buf():
        ways.append("dma-buf")
    if ways:
        return f"network cards reach GPU memory by {' or '.join(ways)}"
    return "without nvidia_peermem and dma-buf NCCL may copy GPU memory through the host, and NVSHMEM cannot be used"


def _exports_dma_buf() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value = ctypes.c_int()
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetAttribute(ctypes.byref(value), _DMA_BUF_SUPPORTED, 0) == 0
    return found and value.value == 1


def _files(package: str) -> list[str]:
    try:
        return [Path(file).name for file in metadata.files(package) or ()]
    except metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
