import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distca.commands.data import describe
from distca.commands.plan import plan
from distca.errors import OptionError, PlanError
from distca.plan import load_table
from distca.plan.cost.table_file import TABLES

TABLE = TABLES / "cpu_reference_4x2x32.json"


def test_servers_without_a_model_are_drawn_and_lie_on_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    plan("pretrain", 2, servers=2, tokens_per_rank=16_384, ranks_per_node=2, nano_batches=2, picture=str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "between 2 nodes, forward, 1 layer" in " ".join(capsys.readouterr().out.replace("│", "").split())


def test_the_command_prints_the_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, picture = tmp_path / "lengths.txt", tmp_path / "new" / "plan.png"
    lengths.write_text("\ufeff100000\n4000\n\n6000\n")
    plan(str(lengths), ranks=4, picture=str(picture))
    shown = capsys.readouterr().out
    assert "3 documents, 110,000 tokens" in shown
    assert "imbalance planned" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_figures_for_programs_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, picture = tmp_path / "lengths.txt", tmp_path / "plan.png"
    lengths.write_text("100000\n4000\n6000\n")
    plan(str(lengths), ranks=4, layer_types="window,full", window=1024, json=True, picture=str(picture))
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 3 and found["tokens"] == 110_000 and found["layers"] == 2
    assert 1 <= found["slowest_over_mean_planned"] < found["slowest_over_mean_in_order"]
    assert len(found["seconds_of_one_layer_by_server"]) == 4 and found["kv_bytes"] > 0
    assert len(found["kinds"]) == 2 and picture.exists()


def test_paths_with_brackets_and_dollars_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither rich's markup nor matplotlib's formulas; and in one line where that goes into a file."""
    folder = tmp_path / "[red]$a$c$_$[" / "b]"
    folder.mkdir(parents=True)
    (folder / "lengths.txt").write_text("100000\n4000\n")
    plan(str(folder / "lengths.txt"), ranks=2, picture=str(folder / "plan.png"))
    assert f"\nPicture written to {folder / 'plan.png'}.\n" in capsys.readouterr().out
    describe(str(folder), source="text")
    assert "[red]$a$c$_$[/b]" in "".join(capsys.readouterr().out.split())


def test_a_mixed_stack_is_planned_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, picture = tmp_path / "lengths.txt", tmp_path / "plan.svg"
    lengths.write_text("100000\n4000\n6000\n")
    plan(str(lengths), ranks=4, layer_types="window, window,full", window=1024, layers=6, picture=str(picture))
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (
        "4 of 6 layers: window 1,024" in shown
        and "2 of 6 layers: full" in shown
        and "q to servers, all ranks, 6 layers" in shown
    )
    drawn = picture.read_text()
    assert "<!-- full -->" in drawn and "<!-- window 1,024 -->" in drawn and "mean of all layers" in drawn
    plan(str(lengths), ranks=4, picture=str(picture))
    drawn = picture.read_text()
    assert "<!-- full -->" not in drawn and "<!-- mean -->" in drawn and "forward and backward -->" in drawn


def test_recurrent_layers_move_summaries_and_halos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1000\n")
    given: dict[str, Any] = {"ranks": 2, "layers": 6, "recurrent_heads": "2,4,8,6"}
    plan(str(lengths), layer_types="recurrent,recurrent,full", json=True, **given)
    found = json.loads(capsys.readouterr().out)
    # Head, middle and tail of the one document: a state and a summary travel, in either direction, and two halos.
    state, transition, halo = 4 * 4 * 8 * 6, 4 * 4 * 8 * 8, 3 * 2 * (2 * 2 * 8 + 4 * 6)
    recurrent = found["recurrent"]
    assert found["layers"] == 2 and recurrent["layers"] == 4 and recurrent["most_pieces_of_a_document"] == 3
    assert recurrent["bytes_of_one_layer"] == 2 * (2 * state + transition + 2 * halo)
    plan(str(lengths), layer_types="recurrent,recurrent,full", **given)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "q to servers, all ranks, 2 layers" in shown and "summaries and halos, 4 recurrent layers" in shown
    assert "most pieces of a document 3 " in shown
    plan(str(lengths), json=True, ranks=2)
    assert json.loads(capsys.readouterr().out)["recurrent"] is None


def test_nodes_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(
        OptionError, match="--ranks and --servers are 12 and 0, together not a multiple of --ranks_per_node 8"
    ):
        plan("pretrain", ranks=12, ranks_per_node=8)


def test_more_tokens_than_can_be_drawn_are_refused() -> None:
    with pytest.raises(OptionError, match=r"--tokens_per_rank is 9+; with --ranks 8 it must be at most 536870912\."):
        plan("pretrain", tokens_per_rank=99999999999999999999)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": -2}, "--ranks is -2; it must be at least 1"),
        ({"tokens_per_rank": 0}, "--tokens_per_rank is 0"),
        ({"layers": 0}, "--layers is 0"),
        ({"layer_types": "full,chunk"}, "--layer_types is 'full,chunk'; it must be full, window and recurrent"),
        ({"layer_types": "recurrent"}, "--layer_types is 'recurrent', without attention to plan"),
        ({"recurrent_heads": "16,30,128,128"}, "--recurrent_heads is '16,30,128,128'; it must be four numbers"),
        ({"recurrent_heads": "16,32,128"}, "--recurrent_heads is '16,32,128'; it must be four numbers"),
        ({"layer_types": "window,full", "window": 8, "layers": 1}, "--layers is 1, but --layer_types names 2 layers"),
        ({"layer_types": "window,full"}, "--window is 0 with --layer_types window,full"),
        ({"window": 1024}, "--window is 1024 with --layer_types full"),
        ({"window": -1}, "--window is -1; it must be at least 0"),
        ({"seed": -1}, "--seed is -1; it must be at least 0"),
        ({"tolerance": 7}, "--tolerance is 7; it must be at least 0 and below 1"),
        ({"picture": "plan.xyz"}, r"must end in one of .*\.png"),
        ({"picture": "plan"}, r"must end in one of .*\.png"),
        ({"cost_table": "nope.json"}, r"nope\.json cannot be read"),
        ({"cost_table": __file__}, "is not JSON"),
        (
            {"cost_table": str(TABLE.with_name("h100-80gb-hbm3_flash4_32x8x128_w1024.json"))},
            "measured for layers with a window of 1,024; give the table of layers without a window",
        ),
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


def test_memory_of_servers_without_a_model_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    plan("pretrain", ranks=4, servers=2, tokens_per_rank=2048, layers=3, json=True)
    keep = json.loads(capsys.readouterr().out)["memory_bytes_of_servers_without_a_model"]
    plan("pretrain", ranks=4, servers=2, tokens_per_rank=2048, layers=3, resend=True)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert len(keep) == 2 and min(keep) > 0 and "memory of the fullest of 2 servers without a" in shown


def test_importing_it_needs_numpy_only() -> None:
    code = (
        "import sys, distca.commands.plan; "
        "bad = [m for m in ('torch', 'rich', 'matplotlib', 'megatron') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
