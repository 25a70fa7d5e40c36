"""What one Adam held another one goes on with: torch's, and Transformer Engine's in all its ways of holding it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distca.testing.ranks import run_ranks
from megatron_patches.checkpoint.adam_state import get_states, join, set_state, set_step, split
from tests.megatron_patches.checkpoint.fused_adam import FusedAdam
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

HOW: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "torch": {},
    "fused": {},
    "bf16 moments": {"moments": torch.bfloat16},
    "fp16 moments": {"moments": torch.float16},
    "remainders": {"remainders": True},
    "remainders and bf16 moments": {"remainders": True, "moments": torch.bfloat16},
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
    if "remainders" in KINDS[kind]:
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
    exact = KINDS[after].get("moments", torch.float32) in (torch.float32, KINDS[before].get("moments"))
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(loaded[name], saved[name], rtol=1e-6 if exact else 1e-2, atol=1e-5), name
    _step(adam, weight, 3)
    _step(following, own, 3)
    # An Adam that began to count anew would move 1.6 times as far in this step.
    moved, expected = (get_states(*each)["param"] - saved["param"] for each in ((following, own), (adam, weight)))
    assert float((moved - expected).norm() / expected.norm()) < (1e-3 if exact else 2e-2)


def _with_fused_adam(first: list[str], folder: Path, second: list[str]) -> None:
    """Train, take the last checkpoint away and resume, with the stand-in where Megatron takes Transformer Engine's."""
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    train_all([first])
    shutil.copytree(folder / "run", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoints" / "step_000004")
    train_all([second])


@pytest.mark.parametrize("distributed", [True, False])
def test_a_resumed_run_equals_an_uninterrupted_one(distributed: bool, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    own: dict[str, Any] = {
        "output": tmp_path,
        "data__path": tmp_path / "texts",
        "train__steps": 4,
        "train__precision": "bf16",
        "checkpoint__save_every": 2,
        "optimizer__distributed": distributed,
    }
    lines = arguments(name="run", **own), arguments(checkpoint__resume=tmp_path / "resumed", **own)
    run_ranks(1, _with_fused_adam, lines[0], tmp_path, lines[1])
    for key in ("loss", "grad_norm"):
        assert steps_of(tmp_path / "resumed", key) == steps_of(tmp_path / "run", key)
    assert len(set(steps_of(tmp_path / "run").values())) == 4
