"""Runs from the command line: what they leave behind, how they go on, and what ends them once they have started.

They are forked, as tests/testing/programs.py says; tests/docs/test_commands.py really starts one, by README's command.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.train.run.run_folder import RunFolder
from tests.testing.programs import torchrun
from tests.train.small_runs import arguments, steps_of, write_texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("starts")
    write_texts(path / "texts")
    return path


def start(*line: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    return torchrun(ranks, "pretrain_llama.py", *line)


@pytest.fixture(scope="module")
def started(folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    line = arguments(name="started", output=folder, data__path=folder / "texts", log__timeline_steps="[2,3]")
    line += ["--log.profile_steps", "[5,9]"]
    line += [
        "--checkpoint.save_every",
        "2",
        "--checkpoint.keep",
        "2",
        "--log.tensorboard",
        "true",
        "--log.memory",
        "true",
    ]
    done = start(*line)
    assert done.returncode == 0, done.stderr
    return folder / "started", done


def test_a_run_leaves_everything_it_promises(started: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run, done = started
    assert {path.name for path in run.iterdir()} == {
        ".held-by",
        "config.yaml",
        "console.log",
        "starts.json",
        "metrics.jsonl",
        "balance.png",
        "timeline.json",
        "profile",
        "ranks",
        "tensorboard",
        "checkpoints",
    }
    assert (run / "balance.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    traces = [f"steps_000005_000006_rank_000{rank}.json.gz" for rank in range(2)]
    assert sorted(path.name for path in (run / "profile").iterdir()) == traces
    with gzip.open(run / "profile" / traces[1]) as trace:
        assert any(event["name"].startswith("aten::") for event in json.load(trace)["traceEvents"])
    assert "Run folder: " in (run / "ranks" / "rank_0001.log").read_text() and "[rank 1]" not in done.stderr
    saved = sorted((run / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step_000004", "step_000006"], "keep is 2"
    assert all((path / "COMPLETE").exists() for path in saved)
    assert "started: 6 steps" in done.stderr + done.stdout and "step 6/6" in done.stderr
    assert "Warning" not in done.stderr, "warnings that a user can do nothing about"
    (start_of_it,) = json.loads((run / "starts.json").read_text())
    assert start_of_it["ranks"] == 2 == sum(start_of_it["hosts"].values()) and start_of_it["versions"]["torch"]
    assert "--checkpoint.save_every" in start_of_it["command"]
    last = next(line for line in done.stderr.splitlines() if "step 6/6" in line)
    said = [line.split("INFO ")[1] for line in done.stderr.splitlines() if "INFO " in line]
    assert said == [line.split("INFO ")[1] for line in (run / "console.log").read_text().splitlines()]
    assert any(line.startswith("Transport: gloo over 2 ranks") for line in said[: said.index(f"Run folder: {run}")])
    assert " perplexity " in last and " gradient " in last and " tokens " in last and "ETA" not in last


def test_metrics_hold_the_documented_keys(started: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    lines = [json.loads(line) for line in (started[0] / "metrics.jsonl").read_text().splitlines()]
    always = {"step", "loss", "lr", "grad_norm", "tokens", "step_s", "tokens_per_s", "bytes_moved", "plan_ms"}
    always |= {"imbalance_before", "imbalance_after", "imbalance_measured"}
    for number, values in enumerate(lines, start=1):
        assert values["step"] == number
        assert values["tokens_seen"] == sum(each["tokens"] for each in lines[:number])
        assert always <= values.keys()
        assert values["tokens_per_s"] == pytest.approx(values["tokens"] / values["step_s"])
        assert values["imbalance_before"] >= 1 and values["imbalance_measured"] >= 1
    assert "validation_loss" in lines[-1] and "validation_loss" not in lines[0]
    # A CPU rank's memory of the moment is no peak, and is not shown as one.
    assert all(0 < values["resident_memory_gb"] < 100 for values in lines)
    assert not lines[0].keys() & {"peak_memory_gb", "outside_torch_gib"}
    assert "peak memory" not in started[1].stderr.partition("started: 6")[2]


def test_the_timeline_is_a_trace_of_every_rank(started: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    events = json.loads((started[0] / "timeline.json").read_text())["traceEvents"]
    tracks = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    kinds = ("q,k,v forward", "o forward", "dq,dk,dv backward")
    travel = {f"transfers {half} {kind}" for half in ("ping", "pong") for kind in kinds}
    expected = {"steps", "compute ping", "compute pong"} | travel
    assert expected <= {name for rank, name in tracks if rank == 0} == {name for rank, name in tracks if rank == 1}
    spans = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0 and all(event["dur"] >= 0 for event in spans)
    for track in {(event["pid"], event["tid"]) for event in spans}:
        ends = 0.0
        for event in sorted((e for e in spans if (e["pid"], e["tid"]) == track), key=lambda each: each["ts"]):
            assert event["ts"] >= ends - 0.01, f"{event} overlaps another one of its track"
            ends = event["ts"] + event["dur"]
    sent = [event for event in spans if event["cat"].startswith("transfers")]
    assert all(set(event["args"]) == {"bytes sent", "peers"} for event in sent)
    lines = [json.loads(line) for line in (started[0] / "metrics.jsonl").read_text().splitlines()]
    assert sum(e["args"]["bytes sent"] for e in sent) == sum(line["bytes_moved"] for line in lines[1:3])
    assert [e["name"] for e in spans if e["cat"] == "steps" and e["pid"] == 0] == ["step 2", "step 3"]
    served = [event for event in spans if event["pid"] == 0 and event["name"].startswith("serve")]
    assert len(served) == 2 * 2 * 2 * 2, "two steps of two layers, two halves, forward and backward"
    assert {event["name"].partition(", ")[2] for event in served} == {"full"}, "the kind of layer"


def test_config_yaml_starts_the_same_run_again_and_resumes_it(
    started: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, _ = started
    copy = run.with_name("copy")
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000006")
    done = start("--config", str(run / "config.yaml"), "--checkpoint.resume", str(copy))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, "warnings that a user can do nothing about"
    assert "2 steps, from step 5 on" in done.stderr + done.stdout
    assert steps_of(copy) == steps_of(run)
    assert (copy / "config-from-step-000004.yaml").exists()
    assert [path.name for path in sorted((copy / "checkpoints").iterdir())] == ["step_000004", "step_000006"]


def test_what_happens_before_the_folder_is_there_is_in_its_log_too(folder: Path) -> None:
    line = arguments(name="early", output=folder, data__path=folder / "texts", train__steps=3, cad__enabled="false")
    line += ["--cad.backward", "resend"]
    for more in ([], ["--checkpoint.resume", str(folder / "early"), "--train.steps=4", "--optimizer.clip_grad=2"]):
        done = start(*line, *more, ranks=1)
        assert done.returncode == 0, done.stderr
    log = (folder / "early" / "console.log").read_text()
    assert log.count("INFO Transport: gloo over 1 rank\n") == log.count("INFO Model: ") == 2
    assert log.count("INFO Without effect, because cad.enabled is false: cad.backward resend\n") == 2
    assert log.count("WARNING Not as in the part before step 4: optimizer.clip_grad") == 1


def test_flipped_bits_are_not_resumed_from_but_the_checkpoint_before(
    started: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, _ = started
    copy = run.with_name("flipped")
    shutil.copytree(run, copy)
    shard = copy / "checkpoints" / "step_000006" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x40
    shard.write_bytes(content)
    done = start("--config", str(run / "config.yaml"), "--checkpoint.resume", str(copy), "--train.steps", "7")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("__1_0.distcp is not what was saved, as its checksum shows") == 1
    assert "Resumed from" in done.stderr and "step_000004" in done.stderr.partition("Resumed from")[2].splitlines()[0]
    again, whole = steps_of(copy), steps_of(run)
    assert [again[step] for step in range(1, 5)] == [whole[step] for step in range(1, 5)] and set(again) == set(
        range(1, 8)
    )


def test_code_in_a_checkpoint_is_not_run(started: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run, _ = started
    copy = run.with_name("code")
    shutil.copytree(run, copy)
    for step in (4, 6):
        checkpoint = copy / "checkpoints" / f"step_00000{step}"
        (checkpoint / ".metadata").write_bytes(pickle.dumps(_Touches(copy / "ran")))
        RunFolder(copy).mark_complete(step)  # with the right checksums
    done = start("--config", str(run / "config.yaml"), "--checkpoint.resume", str(copy), "--train.steps", "7")
    assert done.returncode != 0 and not (copy / "ran").exists()
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        len(said) == 1
        and "step_000006 is damaged: " in said[0]
        and "it names posix.system, which is no part of" in said[0]
    )
    assert "Traceback" not in done.stderr.partition("error: ")[0]


class _Touches:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_what_is_no_number_any_more_ends_the_run_before_it_is_saved(folder: Path) -> None:
    settings = {"optimizer__lr": 1e30, "optimizer__min_lr": 0, "optimizer__clip_grad": 0, "checkpoint__save_every": 1}
    line = arguments(data__path=folder / "texts", output=folder / "diverging", train__steps=40, **settings)
    done = start(*line)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and "has loss" in said and "with optimizer.lr 1e+30" in said, done.stderr
    assert said.count("what follows could only be worse") == 1
    (run,) = (folder / "diverging").iterdir()
    finite = [step for step, loss in steps_of(run).items() if isinstance(loss, float) and math.isfinite(loss)]
    saved = max(int(path.name[5:]) for path in (run / "checkpoints").iterdir())
    assert saved == max(finite) < 40


def test_a_document_that_one_rank_cannot_read_is_named_by_it(folder: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    path = folder / "bad"
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    for token in [7] * 39 + [300]:
        builder.add_document(torch.full((10,), token, dtype=torch.int32), [10])
    builder.finalize(f"{path}.idx")
    own = {"data__source": "indexed", "data__path": path, "data__vocabulary": 256, "data__validation_fraction": 0}
    done = start(*arguments(output=folder / "unread", train__steps=40, **own))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ") and "300" in line]
    assert len(said) == 1, done.stderr
