"""What one Adam held another one goes on with: torch's, and Transformer Engine's in all its ways of holding it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distca.testing.ranks import run_ranks
from megatron_patches.checkpoint.adam_state import get_states, join, set_state, set_step, split
from tests.megatron_patches.checkpoint.fused_adam import FusedAdam, use_fused_adam
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

HOW: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
REMAINDERS = {"master_weights": True, "store_param_remainders": True}


def _moments(dtype: torch.dtype) -> dict[str, Any]:
    return {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}


KINDS: dict[str, dict[str, Any]] = {
    "torch": {},
    "fused": {},
    "bf16 moments": _moments(torch.bfloat16),
    "fp16 moments": _moments(torch.float16),
    "main weights": {"master_weights": True},
    "remainders": REMAINDERS,
    "remainders and bf16 moments": REMAINDERS | _moments(torch.bfloat16),
}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=20))
def test_bfloat16_and_remainder_are_the_whole_number(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32).clamp(-3e38, 3e38)
    top, rest = split(values)
    assert (top.dtype, rest.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(top, rest), values)
    # Rounded to the nearest: half of the last of 8 bits at most.
    assert bool(((top.float() - values).abs() <= values.abs() * 2**-8 + 1e-40).all())


def _made(kind: str) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(200, generator=generator)
    if "master_weights" in KINDS[kind]:
        weight = weight.bfloat16()
    weight = torch.nn.Parameter(weight)
    return (torch.optim.AdamW if kind == "torch" else FusedAdam)([weight], **HOW, **KINDS[kind]), weight


def _step(adam: Any, weight: torch.Tensor, number: int) -> None:
    gradient = torch.randn(200, generator=torch.Generator().manual_seed(number))
    weight.grad = gradient.to(weight.dtype)
    adam.step()


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_one_goes_on_where_another_was(before: str, after: str) -> None:
    adam, weight = _made(before)
    for number in range(3):
        _step(adam, weight, number)
    saved = {name: values.clone() for name, values in get_states(adam, weight).items()}
    assert set(saved) == {"param", "exp_avg", "exp_avg_sq"}
    assert all(values.dtype == torch.float32 for values in saved.values())

    following, own = _made(after)
    _step(following, own, 9)  # so that it has a state, of something else
    for name, values in saved.items():
        set_state(following, own, name, values)
    set_step(following, 3)
    loaded = get_states(following, own)
    assert torch.equal(loaded["param"], saved["param"])
    exact = KINDS[after].get("exp_avg_dtype", torch.float32) in (torch.float32, KINDS[before].get("exp_avg_dtype"))
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(loaded[name], saved[name], rtol=1e-6 if exact else 1e-2, atol=1e-5), name
    _step(adam, weight, 3)
    _step(following, own, 3)
    # An Adam that began to count anew would move 1.6 times as far in this step.
    moved, expected = (get_states(*each)["param"] - saved["param"] for each in ((following, own), (adam, weight)))
    assert float((moved - expected).norm() / expected.norm()) < (1e-3 if exact else 2e-2)


def _with_fused_adam(first: list[str], folder: Path, following: list[list[str]]) -> None:
    """Train, take the last checkpoint away and resume, with the stand-in where Megatron takes Transformer Engine's."""
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    use_fused_adam()
    train_all([first])
    if dist.get_rank() == 0:
        shutil.copytree(folder / "run", folder / "resumed")
        shutil.rmtree(folder / "resumed" / "checkpoints" / "step_000004")
    dist.barrier()
    train_all(following)


WIDE = torch.float32
NARROW = {"train__moments": "bfloat16", "train__gradients": "bfloat16"}


def _lines(tmp_path: Path, **settings: Any) -> tuple[list[str], list[str]]:
    """Of a run of four steps, and of one that goes on with what it saved after two."""
    write_texts(tmp_path / "texts")
    own: dict[str, Any] = {
        "output": tmp_path,
        "data__path": tmp_path / "texts",
        "train__steps": 4,
        "train__precision": "bf16",
        "checkpoint__save_every": 2,
    } | settings
    return arguments(name="run", **own), arguments(checkpoint__resume=tmp_path / "resumed", **own)


@pytest.mark.parametrize(
    "ranks, settings", [(1, {}), (1, {"optimizer__distributed": False}), (2, NARROW)], ids=["", "whole", "narrow"]
)
def test_a_resumed_run_equals_an_uninterrupted_one(ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    first, second = _lines(tmp_path, **settings)
    run_ranks(ranks, _with_fused_adam, first, tmp_path, [second])
    for key in ("loss", "grad_norm"):
        assert steps_of(tmp_path / "resumed", key) == steps_of(tmp_path / "run", key)
    assert len(set(steps_of(tmp_path / "run").values())) == 4


def _between_kinds(first: list[str], folder: Path, following: list[list[str]]) -> list[bool]:
    """As :func:`_with_fused_adam`, but the first run saves main weights half-way between two bfloat16 numbers, which
    may be rounded up or down; returns whether ranks had the same weights after each load."""
    from megatron_patches.checkpoint import optimizer_state, save_load

    exact, load, alike = optimizer_state.get_states, save_load.load_checkpoint, []

    def half_way(adam: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        states = exact(adam, weight)
        bits = states["param"].view(torch.int32) & -0x20000 | 0x8000
        return states | {"param": bits.view(torch.float32)} if adam.name_to_dtype_map["exp_avg"] == WIDE else states

    def loaded(path: Path, model: Any, optimizer: Any) -> dict[str, Any]:
        extra = load(path, model, optimizer)
        weights = torch.cat([weight.detach().float().flatten() for weight in model.parameters()])
        everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, weights)
        alike.append(all(torch.equal(each, weights) for each in everyone))
        return extra

    optimizer_state.get_states, save_load.load_checkpoint = half_way, loaded
    _with_fused_adam(first, folder, following)
    optimizer_state.get_states, save_load.load_checkpoint = exact, load
    return alike


def test_moments_of_another_type_go_on_with_the_same_weights_on_all_ranks(tmp_path: Path) -> None:
    first, second = _lines(tmp_path)
    resumed = [*second, *(word for name, kind in NARROW.items() for word in (f"--{name.replace('__', '.')}", kind))]
    assert run_ranks(2, _between_kinds, first, tmp_path, [resumed]) == [[True], [True]]
    losses, expected = steps_of(tmp_path / "resumed"), steps_of(tmp_path / "run")
    assert losses[4] == pytest.approx(expected[4], rel=1e-2) and losses[4] != expected[4]
