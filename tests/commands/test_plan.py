import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from distca.commands.plan import (
    draw,
    lower_bound,
    most_received,
    plan,
    read_lengths,
    seconds_by_home,
    shortest_shard,
    summary,
)
from distca.plan import PlanError, analytic_cost, plan_micro_batch, route

COST = analytic_cost(32, 8, 128)


def made():
    return plan_micro_batch([100_000, 4000, 6000, 900, 20_000], 4, COST, nano_batches=2)


def test_the_command_prints_the_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, picture = tmp_path / "lengths.txt", tmp_path / "plan.png"
    lengths.write_text("100000\n4000\n\n6000\n")
    plan(str(lengths), ranks=4, picture=str(picture))
    shown = capsys.readouterr().out
    assert "3 documents, 110,000 tokens" in shown
    assert "lower bound" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_figures_agree_with_the_plan() -> None:
    found = made()
    console = Console(record=True, width=120)
    console.print(summary(found, layers=3))
    text = console.export_text()
    assert f"{found.imbalance_before:.3f}" in text
    assert f"{found.imbalance_after:.3f}" in text
    assert f"{found.bytes_moved.q * 3 / 2**20:,.1f} MiB" in text
    assert 0 < lower_bound(found) <= found.seconds_after.max()
    parts = [[route(nano.forward, rank) for rank in range(4)] for nano in found.nano_batches]
    received = [[p.q.receive.total * 8192 + p.kv.receive.total * 4096 for p in ranks] for ranks in parts]
    assert most_received(found) == np.max(received)
    assert 0 < shortest_shard(found) <= 100_000
    seconds = seconds_by_home(found)
    forward = sum(
        COST.forward(nano.forward.tasks.stop - nano.forward.tasks.start, nano.forward.tasks.stop).sum()
        for nano in found.nano_batches
    )
    np.testing.assert_allclose(seconds.sum(), forward)
    assert (seconds[np.eye(4) == 0] > 0).any()


def test_a_mix_is_drawn_for_all_ranks() -> None:
    assert read_lengths("prolong", tokens=5000, seed=1).sum() == 5000


@pytest.mark.parametrize(
    "content, words",
    [("5\nsix\n", "Line 2 of .* is 'six'"), ("5\n0\n", "Line 2 of .* is '0'"), ("\n", "no document length")],
)
def test_bad_files_are_sentences(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    with pytest.raises(PlanError, match=words):
        read_lengths(str(path), tokens=1, seed=0)
    with pytest.raises(PlanError, match="neither a file nor one of the mixes pretrain, prolong"):
        read_lengths(str(tmp_path / "none"), tokens=1, seed=0)


def test_draw_makes_a_picture(tmp_path: Path) -> None:
    draw(made(), str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_importing_it_needs_numpy_only() -> None:
    code = (
        "import sys, distca.commands.plan; "
        "bad = [m for m in ('torch', 'rich', 'matplotlib', 'megatron') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
