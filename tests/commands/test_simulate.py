import json
from pathlib import Path

import pytest

from distca.commands.main import main
from distca.plan.cost.table_file import TABLES
from distca.simulate import MODELS


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code and what was said by ``distca simulate``."""
    code = 0
    try:
        main(["simulate", *words])
    except SystemExit as left:
        code = int(left.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_sweeps_draws_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["distca", "simulate", "as it was"])
    ends = {"output": "json", "picture": "png", "timeline": "json"}
    files = {name: tmp_path / "new" / f"{name}.{end}" for name, end in ends.items()}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    code, out, said = run(
        capsys, "pretrain-long", "--gpus", "[16,32,16]", "--context", "131072", "--timeline_rank", "1", *options
    )
    assert code == 0
    assert "best-cp" in out
    assert said.count("Attention costs: measured table") == 1
    figures = json.loads(files["output"].read_text())
    assert figures["command"] == "distca simulate 'as it was'"
    cases = figures["cases"]
    assert [(case["gpus"], case["mode"]) for case in cases] == [
        (gpus, mode) for gpus in (16, 32) for mode in ("distca", "best-cp", "best-cp-hidden")
    ]
    assert all(case["tokens_per_s"] > 0 and 0 <= case["exposed_share"] <= case["idle_share"] < 1 for case in cases)
    assert files["picture"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files["timeline"].read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    assert any(event["name"] == "serve 3 forward" for event in events)


def test_lengths_may_be_those_of_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": "a" * size}) + "\n" for size in (700, 90, 300)))
    small = ("--gpus", "16", "--context", "256", "--tokens_per_rank", "512", "--output", str(tmp_path / "found.json"))
    code, _, said = run(capsys, f"jsonl:{tmp_path / 'texts.jsonl'}", "--modes", "distca,packed", *small)
    assert code == 0, said
    assert len(json.loads((tmp_path / "found.json").read_text())["cases"]) == 2


def test_a_context_that_few_gpus_cannot_hold_leaves_out_its_own_cases_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--gpus", "[8,16]", "--context", "[131072,262144]", "--modes", "distca,packed")
    code, out, said = run(capsys, "pretrain", *sizes, "--output", str(tmp_path / "found.json"))
    assert code == 0, said
    cases = json.loads((tmp_path / "found.json").read_text())["cases"]
    refused = {(case["gpus"], case["context"], case["mode"]) for case in cases if "refused" in case}
    assert refused == {(8, 262144, "distca"), (8, 262144, "packed"), (16, 262144, "packed")}
    assert "does not fit into 1 data-parallel rank of 131,072 tokens; lower --context" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "12"), "--gpus is 12, which nodes of 8 do not divide; change --gpus or --gpus_per_node."),
        (("--network_gb_s", "0"), "--network_gb_s is 0"),
        (("--cost_table", str(TABLES / "cpu_reference_4x2x32.json")), "was measured for 4 query heads"),
        (("--tp", "3"), "--tp is 3"),
        (("--modes", "packed", "--tolerance", "0.1"), "--tolerance is DistCA's, but --modes is packed; add distca"),
        (("--modes", "cp8", "--backward", "resend"), "--backward is DistCA's, but --modes is cp8; add distca"),
        (("--modes", "distca-unsplit", "--hide_experts", "true"), "--hide_experts is DistCA's"),
        (("--hide_experts", "true"), "--hide_experts is about rows that travel to experts, but --ep is 1; raise --ep"),
        (("--hide_experts", "true", "--ep", "8", "--recompute", "all"), "training waits for rows of experts where"),
        (("--modes", "distca-hidden"), "distca-hidden is no mode: only baselines take -hidden; leave it out."),
        (("--gpus", "0"), "--gpus is 0"),
        (("--gpus", "[]"), "--gpus is []; give one number"),
        (("--gpus", "2.5"), "--gpus must be a whole number or a list of whole numbers, not 2.5."),
        (("--modes", ","), "--modes is ',', which names none"),
        (("--tolerance", "2"), "--tolerance is 2.0; it must be at least 0 and below 1."),
        (("--model", "9b"), "--model is '9b'; give 8b, 34b"),
        (("--modes", "distca,cp"), "--modes is 'distca,cp'. There is no mode 'cp'"),
        (("--timeline", "t.json", "--timeline_rank", "8"), "servers 0 to 7"),
        (("--context", "[16777216]"), "lower --context or raise --tokens_per_rank."),
        (("--pp", "3"), "--tp × --pp is 8 × 3"),
        (("--attention_tflops", "0"), "--attention_tflops is 0"),
        (("--rates", "nowhere.json"), "--rates nowhere.json cannot be read"),
        (
            ("--memory_gib", "1", "--modes", "best-cp"),
            "and a GPU has 1; lower --tokens_per_rank or choose a --recompute that keeps less or raise --pp.",
        ),
        (
            ("--memory_gib", "1", "--modes", "best-cp", "--recompute", "all", "--gpus", "8", "--tp", "4"),
            "and a GPU has 1; lower --tokens_per_rank or raise --tp or raise --pp.",
        ),
        (("--context", "9" * 20), "--context is 99999999999999999999; it must be at most 4294967296."),
        (("--output", "a", "--timeline", "./a"), "--output and --timeline are both ./a; give another file for one"),
        (("--output", ""), "--output is empty, which cannot be written"),
        (("--output", "/dev/full"), "--output is /dev/full, which cannot be written (No space left on device)"),
        (("--timeline", "/dev/full"), "--timeline is /dev/full, which cannot be written (No space left on device)"),
        (
            ("--fp8", "current", "--model", "small.yaml", "--tp", "1"),
            "give a --cost_table that `distca profile` measured where Transformer Engine is installed, or set --fp8 to",
        ),
        (("--picture", "a.png", "--modes", "packed"), "name distca and another in --modes, not packed."),
        (("--timeline_rank", "1"), "give --timeline FILE too"),
    ],
)
def test_mistakes_are_sentences(
    words: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text("model: {layers: 2, hidden: 128, ffn: 256, heads: 4, kv_heads: 2}")
    code, out, err = run(capsys, "pretrain-long", *words)
    assert code == 2
    assert said in " ".join((out + err).split())
    assert "Traceback" not in out + err


def test_help_names_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "--help")[1]
    shown = "".join(said.split())  # names are broken at hyphens
    assert [name for name in MODELS if f"{name}," not in shown] == []
