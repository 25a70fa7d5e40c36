import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from distca.commands.plan import (
    busiest_rank,
    draw,
    lower_bound,
    most_received,
    plan,
    read_lengths,
    seconds_by_home,
    shortest_shard,
    summary,
)
from distca.errors import OptionError, PlanError
from distca.plan import Links, analytic_cost, load_table, plan_micro_batch, route
from distca.plan.cost.table_file import TABLES
from distca.words import format_bytes

TABLE = TABLES / "cpu_reference_4x2x32.json"
COST = analytic_cost(32, 8, 128)


def made():
    # With homes given, query rows travel too.
    return plan_micro_batch([100_000, 4000, 6000, 900, 20_000], 4, COST, nano_batches=2, rank_of=[0, 1, 2, 3, 1])


def test_the_command_prints_the_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, picture = tmp_path / "lengths.txt", tmp_path / "new" / "plan.png"
    lengths.write_text("\ufeff100000\n4000\n\n6000\n")
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
    assert format_bytes(found.bytes_moved.q * 3) in text
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


def test_busiest_rank_nodes_and_halves_are_those_of_the_routes() -> None:
    documents, links = [100_000, 4000, 6000, 900, 20_000], Links(2)
    found = plan_micro_batch(documents, 4, COST, nano_batches=2, links=links)
    ranks, far, halves, relayed = np.zeros(4), 0, [], 0
    for nano in found.nano_batches:
        parts = [route(nano.forward, rank, links) for rank in range(4)]
        relays = [p.relay.send.total if p.relay is not None else 0 for p in parts]
        relays_in = [p.relay.receive.total if p.relay is not None else 0 for p in parts]
        out = [8192 * (p.q.send.total + p.q.receive.total) + 4096 * p.kv.send.total for p in parts]
        inward = [8192 * (p.q.send.total + p.q.receive.total) + 4096 * p.kv.receive.total for p in parts]
        out, inward = np.array(out) + 4096 * np.array(relays), np.array(inward) + 4096 * np.array(relays_in)
        ranks += np.maximum(out, inward)
        halves.append(int(out.sum()))
        relayed += sum(relays)
        for rank, part in enumerate(parts):
            q, kv = part.q.send.per_peer(4), part.kv.send.per_peer(4)
            other = np.arange(4) // 2 != rank // 2
            far += int(16384 * q[other].sum() + 4096 * kv[other].sum())
    assert relayed > 0
    assert busiest_rank(found).bytes == ranks.max() > 0
    assert busiest_rank(found).over_mean == pytest.approx(ranks.max() / ranks.mean())
    console = Console(record=True, width=140)
    console.print(summary(found, layers=3))
    text = console.export_text()
    assert "between 2 nodes, forward, 3 layers" in text and format_bytes(3 * far) in text
    assert f"{format_bytes(3 * halves[0])} and {format_bytes(3 * halves[1])}" in text
    one = plan_micro_batch(documents, 4, COST)
    console.print(summary(one))
    text = console.export_text()
    assert "nodes" not in text and "ping" not in text


def test_nodes_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(OptionError, match="--ranks is 12, which nodes of --ranks_per_node 8 do not divide"):
        plan("pretrain", ranks=12, ranks_per_node=8)


def test_a_mix_is_drawn_for_all_ranks() -> None:
    assert read_lengths("prolong", tokens=5000, seed=1).sum() == 5000


@pytest.mark.parametrize(
    "content, words",
    [
        ("5\nsix\n", "Line 2 of .* is 'six'"),
        ("5\n0\n", "Line 2 of .* is '0'"),
        ("\n", "no document length"),
        ("5\n99999999999999999999\n", r"Line 2 of .* is '9+'; a line holds one length from 1 to 4294967296\."),
        ("9" * 5000, r"Line 1 of .* is '9{40}\.\.\.'; a line holds one length"),
        ("4294967296\n1\n", "add up to 4,294,967,297 tokens; a micro-batch has at most 4,294,967,296"),
        ("5\n\xfe\n", "is not UTF-8 text"),
    ],
)
def test_bad_files_are_sentences(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(PlanError, match=words):
        read_lengths(str(path), tokens=1, seed=0)
    with pytest.raises(PlanError, match="neither a file nor one of the mixes pretrain, prolong"):
        read_lengths(str(tmp_path / "none"), tokens=1, seed=0)


def test_more_tokens_than_can_be_drawn_are_refused() -> None:
    with pytest.raises(OptionError, match=r"--tokens_per_rank is 9+; with --ranks 8 it must be at most 536870912\."):
        plan("pretrain", tokens_per_rank=99999999999999999999)


def test_draw_makes_a_picture(tmp_path: Path) -> None:
    draw(made(), str(tmp_path / "x.svg"), "my lengths")
    text = (tmp_path / "x.svg").read_text()
    assert "my lengths: 5 documents, 130,900 tokens on 4 ranks" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": -2}, "--ranks is -2; it must be at least 1"),
        ({"tokens_per_rank": 0}, "--tokens_per_rank is 0"),
        ({"layers": 0}, "--layers is 0"),
        ({"seed": -1}, "--seed is -1; it must be at least 0"),
        ({"tolerance": 7}, "--tolerance is 7; it must be at least 0 and below 1"),
        ({"picture": "plan.xyz"}, r"must end in one of .*\.png"),
        ({"picture": "plan"}, r"must end in one of .*\.png"),
        ({"cost_table": "nope.json"}, r"nope\.json cannot be read"),
        ({"cost_table": __file__}, "is not JSON"),
        ({"cost_table": str(TABLE), "kv_heads": 2, "head_dim": 32}, "--kv_heads, --head_dim are both given"),
        ({"heads": 0}, "--heads is 0"),
        ({"heads": 10**20}, "--heads is 1(0*); it must be at most 1048576"),
        ({"ranks_per_node": 10**20}, "--ranks_per_node is 1(0*); it must be at most"),
        ({"picture": "/proc/x.png"}, r"--picture is /proc/x\.png, which cannot be written"),
    ],
)
def test_mistakes_are_sentences_before_anything_is_planned(options: dict[str, Any], said: str) -> None:
    with pytest.raises((PlanError, OptionError), match=said):
        plan("nothing", **options)


@pytest.mark.parametrize("text", ["[]", "{}", '{"heads": 4}', None])
def test_what_is_no_cost_table_is_a_sentence(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "table.json"
    words = json.loads(TABLE.read_text()) | {"forward_seconds": [["fast"]]}
    path.write_text(json.dumps(words) if text is None else text)
    with pytest.raises(PlanError, match="cost table"):
        load_table(path)


def test_a_cost_table_counts_for_its_own_heads(capsys: pytest.CaptureFixture[str]) -> None:
    plan("pretrain", ranks=1, tokens_per_rank=2048, cost_table=str(TABLE))
    shown = " ".join(capsys.readouterr().out.split())
    assert "size of a head │ 4, 2, 32" in shown and "2,048 tokens on 1 rank " in shown
    assert "shortest shard sent away │ none" in shown and "q to servers, all ranks, 1 layer │ 0 B" in shown


def test_importing_it_needs_numpy_only() -> None:
    code = (
        "import sys, distca.commands.plan; "
        "bad = [m for m in ('torch', 'rich', 'matplotlib', 'megatron') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
