"""benchmarks/results/planner.md: its table of plans on a network is what the kept results say."""

from __future__ import annotations

import json
import re

from tests.docs.pages import ROOT

PAGE = (ROOT / "benchmarks" / "results" / "planner.md").read_text(encoding="utf-8")
PAIRS = {
    "kb_per_token": ".2f",
    "kb_per_token_between_nodes": ".2f",
    "busiest_over_mean": ".1f",
    "busiest_kb_per_token": ".1f",
    "busiest_kb_per_token_between_nodes": ".1f",
    "kept_kv": ".1f",
    "received_kv": ".1f",
    "exposed": ".1%",
    "all_ms": ".0f",
}


def test_plans_on_a_network() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "planner_network.json").read_text())["cases"]
    section = PAGE.partition("\n## On a network\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w[^|]* \d+(?:, context \d+K)?) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 24
    for name, cells in rows:
        here, beside = (
            {figure: found["median"] for figure, found in kept[name][tree].items()} for tree in ("here", "beside")
        )
        wanted = [f"{here[figure]:{form}} \\| {beside[figure]:{form}}" for figure, form in PAIRS.items()]
        for place, figure in ((6, "kept_kv"), (8, "received_kv")):
            wanted.insert(place, f"{here[f'{figure}_over_mean']:.1f}, {here[f'{figure}_over_longest_task']:.1f}")
        slowest = [kept[name][tree]["slowest_over_mean"] for tree in ("here", "beside")]
        wanted.insert(0, " \\| ".join(f"{each['median']:.3f} ({each['max']:.3f})" for each in slowest))
        assert cells == " | ".join(wanted).replace("%", " %"), name


def test_times_of_many_servers() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "planner_network.json").read_text())["cases"]
    over = {
        name: each["here"]["all_ms"]["median"] / each["beside"]["all_ms"]["median"]
        for name, each in kept.items()
        if re.search(r" 512(,|$)", name)
    }
    plain = over.pop("pretrain 512")
    assert f"{min(over.values()):.2f} to {max(over.values()):.2f} of the time of 2026-11-22, but {plain:.2f}" in PAGE
    large = [each["here"]["all_ms"] for name, each in kept.items() if " 2048" in name]
    medians = sorted(each["median"] / 1e3 for each in large)
    most = max(each["max"] for each in large) / 1e3
    assert f"{medians[0]:.2f} to {medians[-1]:.2f} s in the median and {most:.2f} s at most" in PAGE
