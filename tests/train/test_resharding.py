"""A checkpoint goes on with other numbers of tensor-parallel, pipeline and data-parallel ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from distca.testing.ranks import run_ranks
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

# float32 losses of about 5 after a few steps of Adam: what is left between two orders of the same additions.
CLOSE = 1e-6
STEPS = 2
"""After the one that is resumed from, validation shows what became of Adam's moments."""
TOKENS = 192
"""Of a micro-batch, however many data-parallel ranks share it."""
CUTS = {
    "tp2-pp2": (2, 2, 4),
    "pp2-dp2": (1, 2, 4),
    "tp2": (2, 1, 2),
    "dp2": (1, 1, 2),
}
"""Tensor-parallel ranks, stages, all ranks."""
KINDS: dict[str, dict[str, object]] = {
    "fp32": {},
    "plain": {"optimizer__distributed": False},
    "bf16": {"train__precision": "bf16"},
}
SAVED = {"fp32": "pp2-dp2", "plain": "tp2-pp2", "bf16": "tp2"}
"""On what each is saved; data-parallel ranks share the writing of the first."""
RESUMED = {"fp32": ["pp2-dp2", "tp2-pp2"], "plain": ["dp2"], "bf16": ["dp2"]}


def _line(folder: Path, cut: str, **settings: object) -> list[str]:
    tp, pp, ranks = CUTS[cut]
    return arguments(
        **{
            "output": folder,
            "data__path": folder / "texts",
            "model__layers": 4,
            "data__tokens_per_rank": TOKENS // (ranks // tp // pp),
            "parallel__tp": tp,
            "parallel__pp": pp,
            "cad__tolerance": 0.1,  # so few tokens can hardly be level, and trying takes most of a run
            "train__micro_batches": 2,
            "train__steps": STEPS,
            "checkpoint__save_every": STEPS - 1,
            "checkpoint__save_at_end": False,
        }
        | settings
    )


def _train_and_resume(
    folder: Path, runs: list[list[str]], copies: list[tuple[str, str]], resumed: list[list[str]]
) -> None:
    """Train ``runs``, which save before their last step, and go on with copies."""
    import torch.distributed as dist

    train_all(runs)
    if dist.get_rank() == 0:
        for name, copy in copies:
            shutil.copytree(folder / name, folder / copy)
    dist.barrier()
    train_all(resumed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs by the names of KINDS, and resumed ones as NAME-on-CUT."""
    folder = tmp_path_factory.mktemp("resharding")
    write_texts(folder / "texts")
    copies = [(name, f"{name}-on-{cut}") for name, cuts in RESUMED.items() for cut in cuts]
    lines = {
        copy: _line(folder, copy.split("-on-")[1], **KINDS[name], checkpoint__resume=folder / copy)
        for name, copy in copies
    }
    runs = {name: _line(folder, SAVED[name], name=name, **settings) for name, settings in KINDS.items()}
    for ranks in (4, 2):
        own = [runs[name] for name in runs if CUTS[SAVED[name]][2] == ranks]
        copied = [(name, copy) for name, copy in copies if CUTS[SAVED[name]][2] == ranks]
        resumed = [line for copy, line in lines.items() if CUTS[copy.split("-on-")[1]][2] == ranks]
        run_ranks(ranks, _train_and_resume, folder, own, copied, resumed)
    return folder


def test_the_same_cut_goes_on_bit_for_bit(folder: Path) -> None:
    for key in ("loss", "grad_norm", "lr", "validation_loss"):
        assert steps_of(folder / f"fp32-on-{SAVED['fp32']}", key) == steps_of(folder / "fp32", key), key


def test_data_parallel_ranks_of_a_stage_write_a_part_each(folder: Path) -> None:
    sizes = [file.stat().st_size for file in (folder / f"fp32/checkpoints/step_{STEPS - 1:06}").glob("*.distcp")]
    assert len(sizes) == 4 and min(sizes) > 0.3 * max(sizes)


@pytest.mark.parametrize("name, cut", [("fp32", cut) for cut in RESUMED["fp32"][1:]] + [("plain", "dp2")])
def test_another_cut_goes_on_with_the_same_losses(folder: Path, name: str, cut: str) -> None:
    run, whole = folder / f"{name}-on-{cut}", folder / name
    for key in ("loss", "grad_norm", "validation_loss"):
        assert steps_of(run, key) == pytest.approx(steps_of(whole, key), rel=CLOSE), key
    assert list(steps_of(run)) == list(range(1, STEPS + 1))


def test_main_weights_of_bfloat16_move_too(folder: Path) -> None:
    """Losses agree as far as bfloat16 does; float32 main weights that were lost or rounded would show after a step."""
    ours, whole = steps_of(folder / "bf16-on-dp2"), steps_of(folder / "bf16")
    assert ours == pytest.approx(whole, rel=1e-4)
