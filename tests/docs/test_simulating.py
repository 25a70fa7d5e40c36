"""benchmarks/results/simulated.md: its tables are what the kept results say."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import numpy as np

from tests.docs.pages import ROOT

PAGE = (ROOT / "benchmarks" / "results" / "simulated.md").read_text(encoding="utf-8")
EXPOSED, HIDDEN = "best-cp", "best-cp-hidden"


def kept(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return content


def cells_of(first: str) -> list[str]:
    """The row of a table that begins so, without its first cell."""
    (row,) = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def over(cell: dict[str, Any], mode: str) -> float:
    """DistCA's speed over a mode's."""
    return float(cell["modes"]["distca"]["tokens_per_s"] / cell["modes"][mode]["tokens_per_s"])


def test_calibration() -> None:
    found = kept("calibration")
    for name, row in (("fitted", "fitted"), ("held_out", "held out")):
        part = found[name]
        errors = [f"{part[error]:.1%}".replace("%", " %") for error in ("median_error", "worst_error")]
        assert cells_of(row) == [f"{part['runs']}, {part['files']}", *errors]
        said = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
        assert re.search(rf"{errors[0]}(, worst| and) {errors[1]}", said), name
    fp8 = [run for run in found["runs"] if re.search("current|delayed|blockwise", run["run"])]
    worst = max(abs(run["error"]) for run in fp8)
    text = " ".join(PAGE.split())
    assert f"The {len(fp8)} runs in FP8 are predicted within {worst * 100:.1f} %" in text
    assert f"{found['orders']['right']} of {found['orders']['pairs']} pairs" in text


def test_the_papers_grid() -> None:
    cells = kept("paper_grid")["cells"] + [each | {"kernel": "fp8"} for each in kept("paper_grid_fp8")["cells"]]
    for kind in ("3D", "4D"):
        for model in ("8b", "34b"):
            for mix in ("pretrain", "prolong"):
                wanted = []
                for kernel in ("flash4", "flash2", "fp8"):
                    these = [
                        each
                        for each in cells
                        if (each["kind"], each["model"], each["mix"], each["kernel"]) == (kind, model, mix, kernel)
                    ]
                    assert len(these) == 9
                    for mode in (EXPOSED, HIDDEN):
                        speeds = [over(each, mode) for each in these]
                        wanted.append(f"{min(speeds):.2f}–{max(speeds):.2f}")
                assert cells_of(f"{kind}, {model.upper()}, {mix}")[1:] == wanted


def test_many_servers() -> None:
    cells = {(each["mix"], each["context"], each["servers"]): each for each in kept("simulated_pools")["cells"]}
    for servers in sorted({servers for _, _, servers in cells}):
        wanted = []
        for mix in ("pretrain", "prolong"):
            for context in (128, 512, 1024, 4096):
                cell = cells.get((mix, context, servers))
                exposed = cell and cell["modes"]["distca"]["exposed_share"]
                speeds = cell and f"{over(cell, EXPOSED):.2f}, {over(cell, HIDDEN):.2f}"
                wanted.append(f"{speeds}; {exposed * 100:.1f} %" if cell else "–")
        assert cells_of(f"{servers:,}") == wanted


def test_a_network_on_cpus() -> None:
    links, errors, right, pairs = kept("slow_network")["links"], [], 0, 0
    for megabits, cells in links.items():
        found = []
        for modes in (cells["pretrain 8K"], cells["prolong 8K"]):
            speeds = [(each["tokens_per_s"], each["tokens_per_s_predicted"]) for each in modes.values()]
            assert list(modes) == ["packed", "cp2-keep", "distca"]
            found += [f"{measured:,.0f} ({predicted:,.0f})" for measured, predicted in speeds]
            told = megabits == "0"  # what packed documents take then
            errors += [abs(measured / predicted - 1) for measured, predicted in speeds[told:]]
            apart = [(a, b) for a, b in combinations(speeds, 2) if abs(a[0] / b[0] - 1) > 0.03]
            right += sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in apart)
            pairs += len(apart)
        assert cells_of("any" if megabits == "0" else megabits) == found
    middle, worst = float(np.median(errors)), max(errors)
    assert f"within {middle * 100:.1f} % in the median and {worst * 100:.1f} % at worst" in PAGE
    assert f"{right} of {pairs} pairs that differ" in PAGE.replace("\n", " ")
