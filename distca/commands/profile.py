"""``distca profile``: measure this machine's attention kernel, linear layers and links into one cost table."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from distca.attention import AttentionSpec, KernelName, choose_kernel
from distca.cluster.interface import LOOPBACK, bind_gloo, on_one_node
from distca.commands.options import check_head_dim, check_least, check_most, check_writable, writing
from distca.errors import PlanError
from distca.log import console
from distca.plan import AttentionKind, AttentionShape
from distca.plan.cost.table_file import table_name, write_table
from distca.profile.links import measure_links
from distca.profile.measure import Progress, measure_device
from distca.profile.timing import EndedEarlyError
from distca.versions import command_line, versions

_MOST_CPU_RANKS = 64
"""Each is a process with torch in it, and waits for its turn on this machine's cores."""
_LINES = 10
"""Lines about a part of the work where standard error is no terminal."""


def profile(
    output: str | None = None,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    hidden: int = 4096,
    ffn: int = 14336,
    kernel: KernelName = "auto",
    window: int = 0,
    value_dim: int = 0,
    ranks: int | None = None,
) -> None:
    """Measure this machine and write one cost table (JSON), for cad.cost_table and `distca plan --cost_table`.

    One device: the attention kernel is held against the reference first, and refused where it is wrong. Then its
    seconds per CA-task inside full batches are measured, and how well their sum predicts mixed batches. Seconds per
    token of the linear layers follow, with Transformer Engine also in FP8. Several: bandwidth and latency between them.
    Started by torchrun on several nodes, links are those of all its ranks. Ended by Ctrl-C or SIGTERM, it writes what
    it has as soon as the kernel was measured once at every point.

    Args:
        output: the file to write; by default named after device, kernel and heads, in this folder.
        heads: query heads on one rank.
        kv_heads: key/value heads on one rank.
        head_dim: size of a head.
        hidden: width of the model, for linear layers.
        ffn: width of its MLP.
        kernel: core-attention kernel; auto takes the fastest one that runs here and passes its self-check.
        window: of layers in which a query sees so many keys; 0 is for layers without. Linear layers and links are
            measured without only.
        value_dim: size of a head of values, where it is smaller than head_dim; 0 for the same.
        ranks: ranks of this machine whose links are measured; by default one for every GPU, 1 without GPUs.
    """
    check_least(1, heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden, ffn=ffn, ranks=ranks)
    check_least(0, window=window, value_dim=value_dim)
    check_head_dim(head_dim)
    check_most(head_dim, value_dim=value_dim)
    value_dim = 0 if value_dim == head_dim else value_dim
    gpus = torch.cuda.device_count()
    if not gpus:
        check_most(_MOST_CPU_RANKS, ranks=ranks)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
    dtype = torch.bfloat16 if gpus else torch.float32
    shape = AttentionShape(heads, kv_heads, head_dim, dtype.itemsize, value_dim)
    kinds = (AttentionKind(head_dim**-0.5, window),)
    spec = AttentionSpec(heads, kv_heads, head_dim, dtype, device, kinds=kinds, value_dim=value_dim)
    chosen = choose_kernel(kernel, spec, setting="--kernel")
    measured_for = heads, kv_heads, head_dim, window, value_dim
    if gpus and ranks is not None and ranks > gpus:
        raise PlanError(f"--ranks is {ranks}, but this machine has {gpus} GPUs; give {gpus} or fewer.")
    if not int(os.environ.get("RANK", "0")):
        # Every default name is written to this folder, whatever the device is called.
        check_writable("output", output or table_name("cpu", chosen.name, *measured_for))
        takes = "about two minutes" if gpus else "about three minutes for 4 heads of 32, eight or more for 32 of 128"
        console().print(f"Measuring {'one GPU' if gpus else 'the CPU'}: {takes}.", highlight=False)
    links = None if window else _links(gpus if ranks is None else ranks, device)
    if int(os.environ.get("RANK", "0")):
        return
    ended: list[int] = []
    with warnings.catch_warnings(), _shown(ended) as part:
        warnings.simplefilter("ignore")  # kernels compiled at first use have much to say
        scalings = [] if window else fp8_scalings(device)
        sizes = {"hidden": hidden, "ffn": ffn}
        try:
            measured = measure_device(
                chosen, shape, device, dtype, **sizes, scalings=scalings, window=window, progress=part
            )
        except EndedEarlyError:
            console().print("Ended before the kernel was measured once at every point; nothing is written.")
            raise SystemExit(128 + ended[0]) from None
    path = Path(output or table_name(measured["device"], chosen.name, *measured_for))
    about = {"command": command_line("distca"), "versions": versions()}
    _show(measured, links)
    with writing("output", path):
        write_table(path, {**about, **measured, "links": links})
    console().print(f"Table written to {path}.", highlight=False, soft_wrap=True)
    if ended:
        console().print(f"Ended early: it lacks {', '.join(measured['lacks']) or 'nothing'}.", soft_wrap=True)
        raise SystemExit(128 + ended[0])


@contextmanager
def _shown(ended: list[int]) -> Iterator[Progress]:
    """Shows the parts of a measurement as bars, or where standard error is no terminal as lines. While it lasts, Ctrl-C
    or SIGTERM ends the measurement after its current run, and a second one at once; ``ended`` gets the signal."""

    def end(got: int, _: object) -> None:
        if ended:
            raise KeyboardInterrupt
        ended.append(got)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    bars = Bars(*columns, console=console(), disable=not console().is_terminal)

    def part(name: str, steps: int) -> Callable[[], None]:
        task, done = bars.add_task(name, total=steps), 0

        def advance() -> None:
            nonlocal done
            done += 1
            bars.advance(task)
            if bars.disable and done * _LINES // steps > (done - 1) * _LINES // steps:
                console().print(f"{name}: {done} of {steps}", highlight=False)
            if ended:
                raise EndedEarlyError

        if ended:
            raise EndedEarlyError
        return advance

    try:
        with bars:
            yield part
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def fp8_scalings(device: torch.device) -> list[str]:
    """Ways to scale tensors to FP8 that this GPU and Transformer Engine know."""
    from megatron_patches.te.installed import why_not_supported

    if device.type != "cuda" or why_not_supported():
        return []
    from megatron_patches.te.choice import why_not_fp8

    return [each for each in ("current", "delayed", "blockwise") if not why_not_fp8(device, each == "blockwise")]


def _links(ranks: int, device: torch.device) -> dict[str, Any] | None:
    """Links of torchrun's world or of ``ranks`` processes started here; None for a single rank."""
    from distca.testing.ranks import run_ranks

    on_gpu = device.type == "cuda"
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        if on_gpu:
            torch.cuda.set_device(device)
        bind_gloo(LOOPBACK if on_one_node(size) else os.environ.get("MASTER_ADDR", ""))
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
        try:
            return measure_links()
        finally:
            dist.destroy_process_group()
    if ranks < 2:
        return None
    found: dict[str, Any] = run_ranks(ranks, measure_links, gpus=on_gpu)[0]
    return found


def _show(measured: dict[str, Any], links: dict[str, Any] | None) -> None:
    table = Table(title=f"{measured['device']}, {measured['kernel']}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    for direction in ("forward", "backward") if measured["validation"] else ():
        error = measured["validation"][f"{direction}_error"]
        table.add_row(f"mixed batches, predicted / measured - 1, {direction}", f"worst {error['worst']:.1%}")
    linear = measured["linear"] or {}
    for direction in ("forward", "backward") if linear else ():
        nanoseconds = linear[f"{direction}_s_per_token"] * 1e9
        table.add_row(f"linear layers, {direction}", f"{nanoseconds:,.1f} ns per token and layer")
    for scaling, factor in linear.get("fp8", {}).items():
        table.add_row(f"linear layers in FP8, {scaling} scaling", f"{factor:.2f} times as long")
    if links:
        rates = [pair["bytes_per_s"] / 1e9 for pair in links["pairs"]]
        latencies = [pair["latency_s"] * 1e6 for pair in links["pairs"]]
        table.add_row("slowest and fastest pair, each way", f"{min(rates):,.1f} to {max(rates):,.1f} GB/s")
        table.add_row("latency of a pair", f"{min(latencies):,.1f} to {max(latencies):,.1f} µs")
        table.add_row("all to all, each rank", f"{links['all_to_all']['bytes_per_s'] / 1e9:,.1f} GB/s")
    if table.row_count:
        console().print(table)
