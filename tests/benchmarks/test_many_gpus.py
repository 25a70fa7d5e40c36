"""The programme for four and eight GPUs: every command can be started, and every part takes at most ten minutes."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import many_gpus, pipeline, predict
from benchmarks.run_costs import GPUS
from benchmarks.throughput.__main__ import asked_of


@pytest.mark.parametrize("gpus", [4, 8])
def test_every_command_can_be_started(gpus: int) -> None:
    runs = many_gpus.runs_of(gpus)
    assert max(Counter(run.name for run in runs).values()) == 1
    for run in runs:
        words = run.words(Path("out") / run.name)
        if run.benchmark == "benchmarks.throughput":
            settings = asked_of(words, gpus)
            assert settings.output.resolve().parent == Path("out").resolve()
        elif run.benchmark == "benchmarks.pipeline":
            assert pipeline.arguments_of(words).ranks == gpus
    seconds: Counter[str] = Counter()
    for run in runs:
        seconds[run.part] += run.seconds
    assert max(seconds.values()) <= many_gpus.PART_S, seconds


def test_seconds_of_a_start_follow_from_its_predicted_steps() -> None:
    words = "--output out --modes packed distca --batches 4 --warm-up 2 --traced 1 -- --config configs/llama-8b.yaml "
    words += "--parallel.tp 1 --data.tokens_per_rank 131072"
    cells = {"pretrain 128K": {"modes": {"packed": {"steps_s": [2.0, 4.0]}, "distca": {"steps_s": [1.0, 3.0]}}}}
    whole = many_gpus.seconds_of({"cells": cells}, words.split(), 4)
    fewer = many_gpus.seconds_of({"cells": cells}, words.replace("--batches 4", "--batches 2").split(), 4)
    assert whole - fewer == pytest.approx(2 * (3 + 2))


def test_a_run_that_cannot_be_predicted_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_gpus, "_call", lambda *_: None)
    run = many_gpus.runs_of(4)[0]
    (tmp_path / "predicted.json").write_text("of an older prediction")
    many_gpus.predict(run, tmp_path, 4, "NVIDIA H200")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("gpu", GPUS)
def test_tables_of_the_other_gpu_stand_in(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(many_gpus, "_call", lambda words, _: called.append(words))
    many_gpus.predict(many_gpus.runs_of(4)[0], tmp_path, 4, gpu)
    options, _ = predict._options(called[0][3:])  # which refuses a GPU that stands in for itself
    assert {options.gpu, options.table_of} == {*GPUS} and options.gpu == gpu


def test_runs_that_nobody_knows_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--gpus", "4", "--output", "out", "--dry-run", "--parts", "long", "--runs", "long", "dense"]
    monkeypatch.setattr("sys.argv", ["many_gpus", *asked])
    with pytest.raises(SystemExit):
        many_gpus.main()
    assert "--runs has dense, and there is no such run; choose among long." in capsys.readouterr().err
