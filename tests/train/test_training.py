"""Whole runs of a very small model on gloo ranks: what a run promises, from the command line to the last checkpoint.

megatron-core takes seconds to import in every rank, so each world of ranks is started once and trains several runs in a
row; the tests then compare what is in their folders.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.testing.ranks import run_ranks
from distca.train.run.run_folder import RunFolder
from tests.train.small_runs import ROOT, arguments, steps_of, train_all, write_texts

pytestmark = pytest.mark.slow

# float32, losses of about 5: what is left between two orders of the same additions, after a few steps of Adam.
CLOSE = 3e-6

VARIANTS = {
    "cad": {},
    "resend": {"cad__backward": "resend", "train__recompute": "mlp"},
    "one-nano-batch": {"cad__ping_pong": False},
    "recompute": {"train__recompute": "all"},
    "home": {"cad__enabled": False},
    "home-recompute": {"cad__enabled": False, "train__recompute": "mlp"},
}
EVEN = 48
"""Tokens of every document where a global batch must hold the same documents however it is cut into micro-batches."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training")
    write_texts(path / "texts")
    write_texts(path / "even", [EVEN] * 40)
    return path


WSD = {"optimizer__schedule": "wsd", "optimizer__decay_steps": 2}
UNCHANGED = {
    "optimizer__lr": 1e-30,
    "optimizer__min_lr": 0,
    "optimizer__schedule": "constant",
    "optimizer__warmup_steps": 0,
}


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    """Runs on two ranks, by name."""

    def line(name: str | None, **settings: object) -> list[str]:
        return arguments(**{"name": name, "output": folder, "data__path": folder / "texts"} | settings)

    saving = {"checkpoint__save_every": 3}
    lines = [
        line("saving", **saving),
        line("saving-plain", optimizer__distributed=False, **saving),
        line("saving-bf16", train__precision="bf16", **WSD, **saving),
        line("validating", train__validate_every=2),
        # The smallest learning rate changes no weight, so every validation sees the same model.
        line("standing", train__validate_every=1, train__steps=3, **UNCHANGED),
    ]
    for name, settings in VARIANTS.items():
        lines.append(line(f"whole-{name}", data__whole_documents=True, train__steps=3, **settings))
    even = {"data__path": folder / "even", "data__context_length": EVEN, "train__steps": 3}
    even |= {"optimizer__schedule": "linear", "optimizer__warmup_steps": 0}
    lines.append(line("accumulated", train__micro_batches=2, data__tokens_per_rank=EVEN, **even))
    lines.append(line("at-once", data__tokens_per_rank=2 * EVEN, **even))
    run_ranks(2, train_all, lines, timeout=200)
    # Fresh processes, and checkpoints as a run leaves them that died after its third step.
    for name in ("saving", "saving-plain", "saving-bf16"):
        _die_after_third_step(folder / name, folder / f"{name}-resumed")
    resumed = [
        line(None, checkpoint__resume=folder / "saving-resumed"),
        line(None, checkpoint__resume=folder / "saving-plain-resumed", optimizer__distributed=False),
        line(None, checkpoint__resume=folder / "saving-bf16-resumed", train__precision="bf16", **WSD),
        line(None, checkpoint__resume=folder / "saving", train__evaluate=True),
    ]
    run_ranks(2, train_all, resumed, timeout=200)
    return folder


@pytest.fixture(scope="module")
def four_ranks(two_ranks: Path) -> Path:
    """Runs on four ranks, by name, in the same folder."""
    folder = two_ranks

    def line(name: str | None, **settings: object) -> list[str]:
        return arguments(**{"name": name, "output": folder, "data__path": folder / "texts"} | settings)

    run_ranks(4, train_all, [line("tensor", parallel__tp=2, checkpoint__save_every=3)])
    _die_after_third_step(folder / "tensor", folder / "tensor-resumed")
    _die_after_third_step(folder / "saving", folder / "saving-on-four")
    resumed = [
        line(None, parallel__tp=2, checkpoint__resume=folder / "tensor-resumed"),
        # As many tokens per step on twice as many ranks.
        line(None, data__tokens_per_rank=48, checkpoint__resume=folder / "saving-on-four"),
    ]
    run_ranks(4, train_all, resumed, timeout=200)
    return folder


def _die_after_third_step(run: Path, copy: Path) -> None:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000006")
    assert (copy / "checkpoints" / "step_000003" / "COMPLETE").exists()


@pytest.mark.parametrize("name", ["saving", "saving-plain", "saving-bf16"])
def test_a_resumed_run_goes_on_bit_for_bit(two_ranks: Path, name: str) -> None:
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert steps_of(two_ranks / f"{name}-resumed", key) == steps_of(two_ranks / name, key), key
    validation = steps_of(two_ranks / name, "validation_loss")
    assert steps_of(two_ranks / f"{name}-resumed", "validation_loss") == validation
    assert list(steps_of(two_ranks / name)) == [1, 2, 3, 4, 5, 6]


def test_the_small_model_learns(two_ranks: Path) -> None:
    losses = steps_of(two_ranks / "saving")
    assert abs(losses[1] - math.log(256)) < 0.1, "an untrained model guesses one of 256 bytes"
    assert losses[6] < losses[1] - 1


def test_the_plain_optimizer_takes_the_same_steps_as_the_distributed_one(two_ranks: Path) -> None:
    for key in ("loss", "grad_norm"):
        distributed, plain = steps_of(two_ranks / "saving", key), steps_of(two_ranks / "saving-plain", key)
        assert plain == pytest.approx(distributed, rel=CLOSE), key


def test_tensor_parallel_ranks_train_alike_and_resume_bit_for_bit(four_ranks: Path) -> None:
    for key in ("loss", "grad_norm", "validation_loss"):
        assert steps_of(four_ranks / "tensor-resumed", key) == steps_of(four_ranks / "tensor", key), key
        assert steps_of(four_ranks / "tensor", key) == pytest.approx(steps_of(four_ranks / "saving", key), rel=CLOSE)


def test_a_checkpoint_goes_on_with_another_number_of_data_parallel_ranks(four_ranks: Path) -> None:
    two, four = steps_of(four_ranks / "saving"), steps_of(four_ranks / "saving-on-four")
    assert four == pytest.approx(two, rel=CLOSE)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "home"])
def test_where_attention_runs_changes_no_loss(two_ranks: Path, variant: str) -> None:
    at_home = two_ranks / "whole-home"
    for key in ("loss", "grad_norm", "validation_loss"):
        expected = pytest.approx(steps_of(at_home, key), rel=CLOSE)
        assert steps_of(two_ranks / f"whole-{variant}", key) == expected, key
    moved = steps_of(two_ranks / f"whole-{variant}", "bytes_moved").values()
    assert all(moved) != variant.startswith("home"), "rows travel if and only if attention is disaggregated"


def test_two_micro_batches_are_one_of_twice_the_size(two_ranks: Path) -> None:
    for key in ("loss", "grad_norm", "tokens"):
        twice, once = steps_of(two_ranks / "accumulated", key), steps_of(two_ranks / "at-once", key)
        assert twice == pytest.approx(once, rel=CLOSE), key


def test_validating_a_model_twice_gives_the_same_value(two_ranks: Path) -> None:
    values = steps_of(two_ranks / "standing", "validation_loss")
    assert list(values) == [1, 2, 3] and len(set(values.values())) == 1


@pytest.mark.parametrize(
    ("run", "rates"),
    [
        ("saving", [0.005, 0.0075, 0.01, 0.0086819805, 0.0055, 0.0023180195]),
        ("at-once", [0.01, 0.007, 0.004]),
        ("saving-bf16", [0.005, 0.0075, 0.01, 0.01, 0.01, 0.0055]),
        ("standing", [1e-30] * 3),
    ],
)
def test_learning_rates_follow_their_schedule(two_ranks: Path, run: str, rates: list[float]) -> None:
    """Cosine and WSD after two steps of warm-up, linear and constant without."""
    assert list(steps_of(two_ranks / run, "lr").values()) == pytest.approx(rates, rel=1e-6, abs=0)


def test_evaluation_gives_the_loss_of_the_last_step_and_trains_nothing(two_ranks: Path) -> None:
    loss = steps_of(two_ranks / "saving", "validation_loss")[6]
    said = f"Validation loss {loss:.4f}, perplexity {math.exp(loss):.4g}."
    assert said in (two_ranks / "saving" / "console.log").read_text()
    assert len(json.loads((two_ranks / "saving" / "starts.json").read_text())) == 2
    assert max(steps_of(two_ranks / "saving")) == 6
    assert not list((two_ranks / "saving").glob("config-from-*"))


def test_validation_does_not_disturb_training(two_ranks: Path) -> None:
    assert list(steps_of(two_ranks / "validating", "validation_loss")) == [2, 4, 6]
    assert steps_of(two_ranks / "validating") == steps_of(two_ranks / "saving")


# --- through the real entry point ------------------------------------------------------------------------------------


def start(*line: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """``torchrun pretrain_llama.py`` on CPU ranks; ``ranks=0`` starts it directly."""
    program = [str(ROOT / "pretrain_llama.py"), *line]
    if ranks:
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *program]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *program],
        env=os.environ | environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


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
    assert last.split("INFO ")[1] in (run / "console.log").read_text()
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
    assert "peak_memory_gb" not in lines[0] and "peak memory" not in started[1].stderr.partition("started: 6")[2]


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


# --- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "missing folder": (2, {"data__path": "{folder}/nowhere"}, "nowhere"),
    "empty folder": (2, {"data__path": "{folder}/nothing"}, "nothing"),
    "no path": (2, {"data__path": None}, "data.source text needs data.path."),
    "document longer than the context": (2, {"data__context_length": 90}, "set data.longer to split"),
    "document longer than a micro-batch": (
        2,
        {"data__tokens_per_rank": 40},
        "data.context_length is 96, but a micro-batch holds 80 tokens",
    ),
    "heads": (6, {"parallel__tp": 3}, "model.heads 4 is not divisible by parallel.tp 3"),
    "too few ranks": (1, {"parallel__tp": 2}, "The run has 1 rank, but parallel.tp 2 needs at least 2"),
    "odd ranks": (3, {"parallel__tp": 2}, "The 3 ranks are not divisible by parallel.tp 2"),
    "unknown setting": (2, {"model__depth": 3}, "There is no setting 'model.depth'"),
    "word for a number": (2, {"train__steps": "many"}, "train.steps must be a whole number, not many"),
    "nothing left": (2, {"checkpoint__resume": "{folder}/started"}, "nothing is left to do. Raise train.steps."),
    "another model": (
        2,
        {"checkpoint__resume": "{folder}/started", "model__layers": 3, "train__steps": 9},
        "does not fit this run: model.layers was 2, now 3.",
    ),
    "documents of one token": (1, {"data__path": "{folder}/ones"}, "No document has more than one token"),
    "no checkpoint": (2, {"checkpoint__resume": "{folder}/texts"}, "which has no complete checkpoint"),
    "other documents": (
        2,
        {"checkpoint__resume": "{folder}/started", "train__steps": 9, "data__seed": 5},
        "resuming would repeat or skip documents",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_before_anything_starts(
    started: tuple[Path, subprocess.CompletedProcess[str]], mistake: str
) -> None:
    folder = started[0].parent
    (folder / "nothing").mkdir(exist_ok=True)
    (folder / "ones").mkdir(exist_ok=True)
    for name in "abcdefghij":
        (folder / "ones" / name).with_suffix(".txt").write_text(name)
    ranks, settings, said = MISTAKES[mistake]
    settings = {"data__path": "{folder}/texts", "output": "{folder}/mistakes"} | settings
    filled = {name: str(value).format(folder=folder) for name, value in settings.items() if value is not None}
    done = start("--check", str(ranks), *arguments(**{"data__path": None} | filled), ranks=0)
    _is_one_sentence(done, said)
    assert not (folder / "mistakes").exists()


def test_a_run_with_damaged_checkpoints_is_refused_before_anything_starts(
    started: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, _ = started
    shutil.copytree(run, run.with_name("damaged"))
    for checkpoint in (run.with_name("damaged") / "checkpoints").iterdir():
        os.truncate(checkpoint / "__0_0.distcp", 100)
    line = arguments(data__path=run.parent / "texts", train__steps=9, checkpoint__resume=run.with_name("damaged"))
    done = start("--check", "2", *line, ranks=0)
    assert done.returncode == 2 and "are damaged, as the lines above say" in done.stderr
    assert "step_000006 is damaged: __0_0.distcp has 100 bytes, not" in done.stderr


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


def test_the_checked_settings_of_a_good_run_are_accepted(folder: Path) -> None:
    done = start("--check", "2", *arguments(data__path=folder / "texts", output=folder / "mistakes"), ranks=0)
    assert done.returncode == 0, done.stderr
    assert not (folder / "mistakes").exists()


def test_a_mistake_ends_all_ranks_of_a_started_run(folder: Path) -> None:
    done = start(*arguments(data__path=folder / "texts", output=folder / "mistakes", model__heads=5), ranks=0)
    _is_one_sentence(done, "model.hidden 32 is not divisible by model.heads 5")
    started = start(*arguments(data__path=folder / "nowhere", output=folder / "mistakes"))
    assert started.returncode != 0
    sentences = [line for line in started.stderr.splitlines() if "nowhere" in line and "Traceback" not in line]
    assert sentences, started.stderr
    assert 'pretrain_llama.py", line' not in started.stderr, "a traceback of ours"
    assert not (folder / "mistakes").exists()


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
    done = start(*arguments(output=folder / "unread", train__steps=40, **own), ranks=3)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ") and "300" in line]
    assert len(said) == 1, done.stderr


def _is_one_sentence(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "rror" in line]) == 1, done.stderr
