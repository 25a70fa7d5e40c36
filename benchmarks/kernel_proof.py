"""The head dimensions and kinds of attention that flash-attn-4 gets right on this GPU, by the self-check of a start.

    python -m benchmarks.kernel_proof --output benchmarks/results/kernel_proof.json

Every case is a process of its own, as many at a time as there are cores: what hangs or breaks a GPU's context ends
alone. Of every head dimension it says whether the kernel is right, whether it is taken, and what `auto` takes in its
place. Right ones, and what is taken in place of others, are checked with 20 seeds. Around two right ones kernels are
made wrong on purpose. 20 starts of the whole choice follow. At last the seconds of a start are taken, with the check
and with what was run before there was one: a few rows of zeros. Without a GPU `--kernel reference` rehearses all this
with a kernel in plain torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distca.attention.flash4 import Flash4Kernel
from distca.attention.kernel import Kernel, TaskBatch
from distca.attention.reference import ReferenceKernel
from distca.attention.select import find_kernel
from distca.attention.self_check import AttentionSpec, Verdict, check
from distca.ops.self_check import Widths, check_operations
from distca.plan.kinds import AttentionKind
from distca.sizes.head_dims import FLASH4
from distca.testing.wrong_kernels import OtherKind, wrong_kernels
from distca.versions import command_line, header, write_report

RIGHT = (24, 32, 56, 64, 88, 96, 120, *range(128, 257, 8))
WRONG = (8, 16, 40, 48, 72, 80, 104, 112)
MADE_WRONG = (64, 128)
"""Head dimensions of the kernels that are made wrong."""
SEEDS, STARTS = 20, 20
_JOB_S = 150
"""Seconds after which a case counts as one that hangs."""

_BAD = (
    "right_refused",
    "wrong_not_refused",
    "right_not_taken",
    "wrong_taken",
    "seeds_refused",
    "kinds_and_variants_refused",
    "made_wrong_not_refused",
    "starts_refused",
    "operations_refused",
)
"""The entries that a summary has nothing in where all is as expected."""

KINDS: dict[str, dict[str, Any]] = {
    "window 100": {"window": 100},
    "window 257": {"window": 257},
    "softcap 5": {"softcap": 5.0},
    "softcap 5, window 100": {"softcap": 5.0, "window": 100},
}


class PlainKernel(ReferenceKernel):
    """Stands in for a GPU's kernel in a rehearsal."""

    name = "plain"


def main() -> None:
    """Run all cases and write the report. A figure that is not as expected is exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON to write")
    parser.add_argument("--kernel", choices=("flash4", "reference"), default="flash4")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16), help="cases at a time")
    parser.add_argument("--dims", type=int, nargs="+", default=[*RIGHT, *WRONG])
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        sys.stdout.write(json.dumps(_run_job(json.loads(asked.job), asked.kernel)) + "\n")
        return
    if asked.output is None:
        parser.error("--output is needed")
    began = time.perf_counter()
    report = {**header(command_line("python -m benchmarks.kernel_proof"), 1), **_run_all(asked)}
    report["took_s"] = round(time.perf_counter() - began, 1)
    write_report(asked.output, report)
    sys.stdout.write(json.dumps(report["summary"], indent=1) + "\n")
    sys.exit(0 if report["summary"]["as_expected"] or asked.kernel == "reference" else 1)


def _run_all(asked: argparse.Namespace) -> dict[str, Any]:
    # The widest compile longest, so they come first.
    jobs: list[dict[str, Any]] = [{"what": "dim", "dim": dim} for dim in sorted(asked.dims, reverse=True)]
    mixed = [dim for dim in (64, 128, 256) if dim in asked.dims]
    jobs += [{"what": "kind", "kind": kind, "dim": dim} for kind in KINDS for dim in mixed]
    jobs += [{"what": "variant", "variant": name, "dim": dim} for name in VARIANTS for dim in mixed[:2]]
    jobs += [{"what": "operations"}]
    with ThreadPoolExecutor(asked.processes) as pool:
        found = list(pool.map(partial(_start_job, asked), jobs))
        dim = 128 if 128 in asked.dims else asked.dims[0]
        starts = [{"what": "start", "dim": dim, "seed": seed} for seed in range(asked.starts)]
        started = list(pool.map(partial(_start_job, asked), starts))
    # One at a time, with all that is compiled already on disk.
    seconds = {
        name: [_start_job(asked, {"what": "seconds", "checked": checked, "dim": dim}) for _ in range(3)]
        for name, checked in (("before", False), ("with the check", True))
    }
    parts: dict[str, Any] = {
        "head_dims": {str(job["dim"]): out for job, out in zip(jobs, found, strict=True) if job["what"] == "dim"},
        "kinds": {_name(job): out for job, out in zip(jobs, found, strict=True) if job["what"] == "kind"},
        "variants": {_name(job): out for job, out in zip(jobs, found, strict=True) if job["what"] == "variant"},
        "operations": found[-1],
        "starts": started,
        "start_seconds": seconds,
    }
    return {"summary": _summary(parts, asked.kernel), **parts}


def _name(job: dict[str, Any]) -> str:
    return f"{job.get('kind') or job.get('variant')}, head dimension {job['dim']}"


def _summary(parts: dict[str, Any], kernel: str) -> dict[str, Any]:
    dims = {int(dim): out for dim, out in parts["head_dims"].items()}
    refused = {dim for dim, out in dims.items() if out.get("objection")}
    right, wrong = ({dim for dim in some if dim in dims} for some in (RIGHT, WRONG))
    made_wrong = {f"{name}, {dim}": bool(said) for dim, out in dims.items() for name, said in out["made_wrong"].items()}
    made_wrong |= {
        f"{name}, one more key": bool(out["off_by_one"])
        for name, out in parts["kinds"].items()
        if out.get("off_by_one", "none") != "none"
    }
    excess = [out["excess"] for dim, out in dims.items() if dim in right and out.get("excess")]
    others = {**parts["kinds"], **parts["variants"]}
    summary: dict[str, Any] = {
        "right_refused": sorted(right & refused),
        "wrong_not_refused": sorted(wrong - refused),
        "right_not_taken": sorted(dim for dim in right if dims[dim].get("auto") != kernel),
        "wrong_taken": sorted(dim for dim in wrong if dims[dim].get("auto") == "flash4"),
        "seeds_refused": {dim: out["seeds_refused"] for dim, out in dims.items() if out.get("seeds_refused")},
        "kinds_and_variants_refused": [name for name, out in others.items() if out.get("objection")],
        "made_wrong": len(made_wrong),
        "made_wrong_not_refused": [name for name, said in made_wrong.items() if not said],
        "starts": len(parts["starts"]),
        "starts_refused": sum(bool(out.get("objection")) for out in parts["starts"]),
        "operations_refused": parts["operations"].get("refused"),
        "furthest_of_right_over_explained": max(excess, default=None),
        "start_s": {
            name: sorted(out.get("seconds", -1.0) for out in outs)[1] for name, outs in parts["start_seconds"].items()
        },
    }
    summary["as_expected"] = not any(summary[name] for name in _BAD)
    return summary


def _start_job(asked: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """The finding of a case's process; its end without an answer, or none in time, is an objection."""
    command = [sys.executable, "-m", "benchmarks.kernel_proof", "--kernel", asked.kernel, "--job", json.dumps(job)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    nothing: dict[str, Any] = {"made_wrong": {}}
    began = time.perf_counter()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_JOB_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {**nothing, "objection": f"no answer within {_JOB_S} s"}
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        return {**nothing, "objection": f"it ended with exit code {ended.returncode}: {last[:300]}"}
    out: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return {**nothing, **out, "process_s": round(time.perf_counter() - began, 1)}


VARIANTS: dict[str, dict[str, Any]] = {
    "without a causal mask": {"causal": False},
    "deterministic": {"deterministic": True},
    "scale 0.2": {"kinds": (AttentionKind(0.2),)},
    "as many kv heads": {"heads": 8, "kv_heads": 8},
    "one kv head": {"kv_heads": 1},
    "32 heads": {"heads": 32, "kv_heads": 8},
    "float16": {"dtype": torch.float16},
}


def _spec(dim: int, kernel: str, **changed: Any) -> AttentionSpec:
    on_gpu = kernel == "flash4"
    usual: dict[str, Any] = {"heads": 8 if on_gpu else 2, "kv_heads": 2 if on_gpu else 1, "dtype": torch.bfloat16}
    return AttentionSpec(head_dim=dim, device=torch.device("cuda" if on_gpu else "cpu"), **usual | changed)


def _run_job(job: dict[str, Any], kernel: str) -> dict[str, Any]:
    began = time.perf_counter()
    run = {"dim": _dim, "kind": _kind, "variant": _variant, "operations": _operations, "start": _start}
    if job["what"] == "seconds":
        return _seconds(job, kernel)
    out = run[job["what"]](job, kernel)
    return {**out, "seconds": round(time.perf_counter() - began, 2)}


def _made(kernel: str, deterministic: bool = False) -> Kernel:
    return Flash4Kernel(deterministic) if kernel == "flash4" else PlainKernel()


def _said(verdict: Verdict) -> dict[str, Any]:
    worst = verdict.furthest
    return {
        "objection": verdict.objection,
        "furthest": str(worst) if worst else None,
        "excess": round(min(worst.excess, 1e6), 3) if worst else None,  # JSON has no infinity
    }


def _dim(job: dict[str, Any], kernel: str) -> dict[str, Any]:
    """A head dimension: with the first seed, right ones with all, and made wrong; and what `auto` takes."""
    spec, right = _spec(job["dim"], kernel), _made(kernel)
    out = {"in_table": job["dim"] in FLASH4, **_said(check(right, spec))}
    began = time.perf_counter()
    check(right, spec)
    out["check_s"] = round(time.perf_counter() - began, 3)
    if out["objection"] is None:
        found = [check(right, spec, seed=seed) for seed in range(1, SEEDS)]
        out["seeds"] = SEEDS
        out["seeds_refused"] = [verdict.objection for verdict in found if verdict.objection]
        out["excess"] = round(max([out["excess"], *(each.furthest.excess for each in found if each.furthest)]), 3)
        if job["dim"] in MADE_WRONG or kernel == "reference":
            out["made_wrong"] = {name: check(wrong, spec).objection for name, wrong in wrong_kernels(right).items()}
    choice = find_kernel("auto", spec)
    if out["objection"] is not None:
        found = [check(choice.kernel, spec, seed=seed) for seed in range(1, SEEDS)]
        out["seeds_refused"] = [verdict.objection for verdict in found if verdict.objection]
    out |= {"auto": choice.kernel.name, "against": dict(choice.against)}
    return out


def _kind(job: dict[str, Any], kernel: str) -> dict[str, Any]:
    """A kind of attention, and where it has a window, a window of one key more."""
    spec = _spec(job["dim"], kernel)
    kind = AttentionKind(spec.head_dim**-0.5, **KINDS[job["kind"]])
    right = _made(kernel)
    out = _said(check(right, replace(spec, kinds=(kind,))))
    if kind.window:
        wider = OtherKind(right, replace(kind, window=kind.window + 1))
        out["off_by_one"] = check(wider, replace(spec, kinds=(kind,))).objection
    return out


def _variant(job: dict[str, Any], kernel: str) -> dict[str, Any]:
    changed = VARIANTS[job["variant"]]
    spec = _spec(job["dim"], kernel, **changed)
    return _said(check(_made(kernel, spec.deterministic), spec))


def _operations(job: dict[str, Any], kernel: str) -> dict[str, Any]:
    """Fused operations, of the widths of an 8B model."""
    widths = Widths(4096, 14336, 32, 8, 128) if kernel == "flash4" else Widths(64, 96, 2, 1, 32)
    spec = _spec(128, kernel)
    check_operations(widths, spec.dtype, spec.device)  # which compiles
    began = time.perf_counter()
    found = check_operations(widths, spec.dtype, spec.device)
    check_s = round(time.perf_counter() - began, 3)
    return {"refused": {name: why for name, why in found.items() if why}, "checked": list(found), "check_s": check_s}


def _start(job: dict[str, Any], kernel: str) -> dict[str, Any]:
    """The choice that a start makes, and the check with other numbers."""
    spec = _spec(job["dim"], kernel)
    choice = find_kernel("auto", spec)
    out = _said(check(_made(kernel), spec, seed=job["seed"]))
    if kernel == "flash4" and choice.kernel.name != "flash4":
        out["objection"] = out["objection"] or str(choice)
    return {**out, "auto": choice.kernel.name}


def _seconds(job: dict[str, Any], kernel: str) -> dict[str, Any]:
    """Seconds from the choice of a kernel, of the 8B model's heads, until it is ready; the GPU is awake before."""
    spec = _spec(job["dim"], kernel, **({"heads": 32, "kv_heads": 8} if kernel == "flash4" else {}))
    torch.ones(8, device=spec.device).sum().item()
    began = time.perf_counter()
    chosen = _made(kernel)
    if job["checked"]:
        check(chosen, spec)
    else:
        _zeros(chosen, spec)
    if spec.device.type == "cuda":
        torch.cuda.synchronize()
    return {"seconds": round(time.perf_counter() - began, 3)}


def _zeros(kernel: Kernel, spec: AttentionSpec) -> None:
    """The rows that were run to compile a kernel before there was a check."""
    rows = 256
    batch = TaskBatch.of(np.array([0, rows // 2, rows]), np.array([0, rows // 2, 2 * rows]), spec.device)
    q = torch.zeros(rows, spec.heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
    kv = torch.zeros(2 * rows, 2, spec.kv_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
    o, lse = kernel.forward(q, kv[:, 0], kv[:, 1], batch, *spec.asked)
    kernel.backward(torch.zeros_like(o), q, kv[:, 0], kv[:, 1], o, lse, batch, *spec.asked)


if __name__ == "__main__":
    main()
