"""Whole runs of a very small model on gloo ranks: losses, schedules, checkpoints and what they go on as.

Each world of ranks is started once and trains several runs in a row; the tests then compare what is in their folders.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from distca.testing.ranks import run_ranks
from tests.testing.asked import asked
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

pytestmark = pytest.mark.slow

# float32, losses of about 5: what is left between two orders of the same additions, after a few steps of Adam.
CLOSE = 3e-6

VARIANTS = {
    "cad": {},
    "one-nano-batch": {"cad__ping_pong": False},
    "resend-recompute": {"cad__backward": "resend", "train__recompute": "all"},
    "offload": {"train__offload": "all"},
    "home": {"cad__enabled": False},
    "home-recompute-all": {"cad__enabled": False, "train__recompute": "all"},
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
def two_ranks(folder: Path, request: pytest.FixtureRequest) -> Path:
    """Runs on two ranks, by name, without those that no test asks for."""
    variants, resumptions = asked(request, "variant"), asked(request, "name")

    def line(name: str | None, **settings: object) -> list[str]:
        usual = {"output": folder, "data__path": folder / "texts", "checkpoint__save_at_end": name == "saving"}
        return arguments(**{"name": name} | usual | settings)

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
        if name == "one-nano-batch" and name not in variants:
            continue
        lines.append(line(f"whole-{name}", data__whole_documents=True, train__steps=3, **settings))
    even = {"data__path": folder / "even", "data__context_length": EVEN, "train__steps": 3}
    even |= {"optimizer__schedule": "linear", "optimizer__warmup_steps": 0}
    lines.append(line("accumulated", train__micro_batches=2, data__tokens_per_rank=EVEN, **even))
    lines.append(line("at-once", data__tokens_per_rank=2 * EVEN, **even))
    run_ranks(2, train_all, lines, timeout=200)
    others = {"data__path": folder / "even", "data__validation_fraction": 0, "train__validate_batches": 2}
    # Fresh processes, and checkpoints as a run leaves them that died after its third step.
    for name in ("saving", "saving-plain", "saving-bf16"):
        _die_after_third_step(folder / name, folder / f"{name}-resumed")
    plain = [line(None, checkpoint__resume=folder / "saving-plain-resumed", optimizer__distributed=False)]
    resumed = [
        line(None, checkpoint__resume=folder / "saving-resumed"),
        *(plain if "saving-plain" in resumptions else ()),
        line(None, checkpoint__resume=folder / "saving-bf16-resumed", train__precision="bf16", **WSD),
        line(None, checkpoint__resume=folder / "saving", train__evaluate=True),
        line(None, checkpoint__resume=folder / "saving", train__evaluate=True, **others),
    ]
    run_ranks(2, train_all, resumed, timeout=200)
    return folder


def _die_after_third_step(run: Path, copy: Path) -> None:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000006", ignore_errors=True)
    assert (copy / "checkpoints" / "step_000003" / "COMPLETE").exists()


@pytest.mark.parametrize(
    "name",
    # A checkpoint of the plain optimizer is resumed in test_resharding.py too.
    ["saving", pytest.param("saving-plain", marks=pytest.mark.matrix), "saving-bf16"],
)
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


@pytest.mark.matrix
def test_a_checkpoint_goes_on_with_another_number_of_data_parallel_ranks(two_ranks: Path) -> None:
    """In the suite with other numbers of tensor-parallel ranks and stages too, in test_resharding.py."""
    folder, copy = two_ranks, two_ranks / "saving-on-four"
    _die_after_third_step(folder / "saving", copy)
    # As many tokens per step on twice as many ranks.
    settings = {"data__path": folder / "texts", "data__tokens_per_rank": 48, "checkpoint__save_at_end": False}
    run_ranks(4, train_all, [arguments(output=folder, checkpoint__resume=copy, **settings)], timeout=200)
    two, four = steps_of(folder / "saving"), steps_of(copy)
    assert four == pytest.approx(two, rel=CLOSE)


@pytest.mark.parametrize(
    "variant",
    # Single nano-batches are held against unmodified Megatron-Core in tests/parity.
    [
        pytest.param(name, marks=pytest.mark.matrix) if name == "one-nano-batch" else name
        for name in VARIANTS
        if name != "home"
    ],
)
def test_where_attention_runs_changes_no_loss(two_ranks: Path, variant: str) -> None:
    at_home = two_ranks / "whole-home"
    for key in ("loss", "grad_norm", "validation_loss"):
        expected = pytest.approx(steps_of(at_home, key), rel=CLOSE)
        assert steps_of(two_ranks / f"whole-{variant}", key) == expected, key
    moved = steps_of(two_ranks / f"whole-{variant}", "bytes_moved").values()
    assert all(moved) != variant.startswith("home"), "rows travel if and only if attention is disaggregated"


def test_host_memory_changes_no_bit(two_ranks: Path) -> None:
    for key in ("loss", "grad_norm", "validation_loss"):
        without, offload = (steps_of(two_ranks / f"whole-{name}", key) for name in ("resend-recompute", "offload"))
        assert without == offload and len(without) == (1 if key == "validation_loss" else 3)


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
    log = (two_ranks / "saving" / "console.log").read_text()
    own, others = re.findall(r"Validation loss (.*), perplexity (.*), over (\d+) target tokens \((.*)\)\.", log)
    assert own[:2] == (f"{loss:.4f}", f"{math.exp(loss):.4g}") and own[3] == "train.validate_batches 1"
    # Of documents that the run did not have: two batches of four, of which none predicts its first token.
    assert others[2:] == (str(8 * (EVEN - 1)), "train.validate_batches 2") and others[0] != own[0]
    assert len(json.loads((two_ranks / "saving" / "starts.json").read_text())) == 3
    assert max(steps_of(two_ranks / "saving")) == 6
    assert not list((two_ranks / "saving").glob("config-from-*"))


def test_validation_does_not_disturb_training(two_ranks: Path) -> None:
    assert list(steps_of(two_ranks / "validating", "validation_loss")) == [2, 4, 6]
    assert steps_of(two_ranks / "validating") == steps_of(two_ranks / "saving")
