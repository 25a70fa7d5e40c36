"""How far kernels of the gated delta rule are from float64, and how long they take, at the heads of Qwen3.5-9B.

    python -m benchmarks.recurrent_kernels --output recurrent_kernels.json
    python -m benchmarks.recurrent_kernels --search distca/recurrent/tuned_hopper

Errors are norm-relative, of whole documents and of the same cut into pieces, with 3 seeds. Times are medians on one
GPU, of whole documents and of what pieces compute beside: summaries, gradients of states alone, and their composition.
``--search`` lets fla-core try every configuration of its kernels on a document of 65,536 rows, and writes the fastest
for ``distca/recurrent/tuned.py``.
Without a GPU `--kernel reference --rows 200` rehearses this with the reference and two tiny heads.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from distca.recurrent import CoreRows, Recurrence, RecurrentKernel, carried
from distca.recurrent.fla_delta_rule import FlaDeltaRule
from distca.recurrent.reference import ReferenceRecurrence
from distca.recurrent.self_check import check, drawn_rows
from distca.recurrent.tuned import use_tuned
from distca.testing.reference_attention import relative_error
from distca.testing.reference_recurrence import in_pieces, spans_of
from distca.versions import command_line, header, write_report

QWEN = Recurrence.gated_delta_net(16, 32, 128, 128)
TINY = Recurrence.gated_delta_net(1, 2, 8, 8)
PIECES = (2, 7, 16)
SEEDS, REPEATS = 3, 7
LONGEST, SEARCHED = 131_072, 65_536


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asks = parser.add_mutually_exclusive_group(required=True)
    asks.add_argument("--output", type=Path, help="the JSON to write")
    asks.add_argument("--search", type=Path, metavar="FOLDER", help="write the fastest configurations into it")
    parser.add_argument("--kernel", choices=("fla", "reference"), default="fla")
    parser.add_argument("--rows", type=int, default=LONGEST, help="of the longest document")
    asked = parser.parse_args()
    if asked.search:
        _search(asked.search, torch.device("cuda"))
        return
    on_gpu = asked.kernel == "fla"
    device, what = (torch.device("cuda"), QWEN) if on_gpu else (torch.device("cpu"), TINY)
    kernels: list[RecurrentKernel] = [ReferenceRecurrence(what)]
    if on_gpu:
        use_tuned(device, what.key_dim)
        kernels = [FlaDeltaRule(what), FlaDeltaRule(what, own_gradients=True)]
    report = header(command_line("python -m benchmarks.recurrent_kernels"), 1) | {
        "heads": {"key": what.key_heads, "value": what.heads, "dim": what.key_dim},
        "kernels": {kernel.name: _of_kernel(kernel, what, device, asked.rows) for kernel in kernels},
    }
    write_report(asked.output, report)
    sys.stdout.write(f"{asked.output} is written.\n")


def _search(folder: Path, device: torch.device) -> None:
    """Write the configuration that fla-core finds the fastest for each of its kernels."""
    kernel = FlaDeltaRule(QWEN, own_gradients=True)
    rows, do = drawn_rows(QWEN, SEARCHED, torch.bfloat16, device, 0)
    in_pieces(kernel, rows, do, spans_of([[SEARCHED // 2, SEARCHED // 2]]))
    from fla.ops.utils.cache import CachedAutotuner

    for each in gc.get_objects():
        if isinstance(each, CachedAutotuner) and each.cache:
            best = list(each.cache.values())[-1]
            chosen = {name: getattr(best, name) for name in ("kwargs", "num_warps", "num_stages", "num_ctas")}
            write_report(folder / f"{each.kernel_name}.json", {"default_config": chosen})
            sys.stdout.write(f"{each.kernel_name}: {chosen}\n")


def _of_kernel(kernel: RecurrentKernel, what: Recurrence, device: torch.device, longest: int) -> dict[str, Any]:
    began = time.perf_counter()
    objection = check(kernel, what, torch.bfloat16, device)
    found: dict[str, Any] = {"self_check": objection or "right", "first_check_s": time.perf_counter() - began}
    if objection is not None:
        return found
    lengths = [rows for rows in (2048, 8192, 32_768, LONGEST) if rows <= longest] or [longest]
    found["errors"] = _errors(kernel, what, device, min(longest, 3001))
    found["ms"] = {rows: _times(kernel, what, device, rows) for rows in lengths}
    found["ms_composing_a_piece"] = _composing(what, device)
    return found


def _errors(kernel: RecurrentKernel, what: Recurrence, device: torch.device, rows: int) -> dict[str, Any]:
    """The largest error of all seeds, by tensor: one rank's, and that of pieces as a factor of it."""
    cuts = {f"{pieces} pieces": _cut(rows, pieces) for pieces in PIECES} | {"1 row at each end": [1, rows - 2, 1]}
    found: dict[str, Any] = {"one rank": {}} | {name: {} for name in cuts}
    for seed in range(SEEDS):
        given, do = drawn_rows(what, rows, torch.bfloat16, device, seed)
        wide = CoreRows(*(each.double() for each in given.all))
        exact = in_pieces(ReferenceRecurrence(what), wide, do.double(), spans_of([[rows]]))
        whole = in_pieces(kernel, given, do, spans_of([[rows]]))
        off = {name: relative_error(whole[name], exact[name]) for name in exact}
        _keep_largest(found["one rank"], off)
        for name, pieces in cuts.items():
            cut = in_pieces(kernel, given, do, spans_of([pieces]))
            _keep_largest(found[name], {each: relative_error(cut[each], exact[each]) / off[each] for each in exact})
    return found


def _cut(rows: int, pieces: int) -> list[int]:
    """Odd lengths that add up to ``rows``."""
    each = rows // pieces | 1
    return [each] * (pieces - 1) + [rows - each * (pieces - 1)]


def _keep_largest(kept: dict[str, float], found: dict[str, float]) -> None:
    for name, value in found.items():
        kept[name] = max(kept.get(name, 0.0), value)


def _times(kernel: RecurrentKernel, what: Recurrence, device: torch.device, rows: int) -> dict[str, float]:
    """Milliseconds of one document of ``rows`` rows."""
    given, do = drawn_rows(what, rows, torch.bfloat16, device, 0)
    o, gradients, spans = torch.empty_like(given.v), given.zeros_like(), [(0, rows)]
    states = torch.zeros(1, *what.state_shape, device=device)
    return {
        "forward": _ms(device, lambda: kernel.forward(given, spans, None, o, False)),
        "backward": _ms(device, lambda: kernel.backward(given, spans, None, do, None, gradients, False)),
        "forward of a last piece": _ms(device, lambda: kernel.forward(given, spans, states, o, False)),
        "backward of a last piece": _ms(device, lambda: kernel.backward(given, spans, states, do, None, gradients)),
        "summary": _ms(device, lambda: kernel.summaries(given, spans)),
        "gradient of a state alone": _ms(device, lambda: kernel.state_gradients(given, spans, do)),
    }


def _composing(what: Recurrence, device: torch.device) -> float:
    transition, state = (torch.randn(shape, device=device) for shape in (what.transition_shape, what.state_shape))
    return _ms(device, lambda: carried(transition, state) + state)


def _ms(device: torch.device, run: Callable[[], Any]) -> float:
    """The median of several calls, after one that compiles."""
    run()
    found = []
    for _ in range(REPEATS):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        found.append(1e3 * (time.perf_counter() - began))
    return round(median(found), 3)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
