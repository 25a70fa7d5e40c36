"""Kernels for GPUs as far as a CPU shows them: refusals, the self-check, and gradients within chunks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca.errors import SupportError
from distca.ops import triton
from distca.recurrent import Recurrence, choose_recurrent_kernel, select, self_check, tuned
from distca.recurrent.chunk_gradients import chunk_gradients
from distca.recurrent.fla_delta_rule import composed, in_parts
from distca.recurrent.reference import ReferenceRecurrence
from distca.recurrent.self_check import check, check_rows
from distca.testing.reference_attention import relative_error
from tests.recurrent.cases import RECURRENCES

NET = Recurrence.gated_delta_net(1, 2, 16, 8)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name,dtype,deterministic,because",
    [
        ("gated delta net", torch.bfloat16, True, "`deterministic` is True"),
        ("gated delta net", torch.float32, False, "take float16 and bfloat16, not float32"),
        ("mamba-2", torch.bfloat16, False, "this is another recurrence"),
    ],
)
def test_gpus_are_refused(
    name: str, dtype: torch.dtype, deterministic: bool, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(select, "_version", lambda: select.FLA_CORE)
    with pytest.raises(SupportError, match=because):
        choose_recurrent_kernel(RECURRENCES[name], "cuda", dtype, deterministic)


def test_a_missing_fla_core_and_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SupportError, match=r"fla-core is not installed: install distca\[recurrent\]"):
        choose_recurrent_kernel(NET, "cuda", torch.bfloat16)
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(select, "_version", lambda: "0.5.1")
    with pytest.raises(SupportError, match=r"fla-core is 0\.5\.1, .* install fla-core 0\.6\.0"):
        choose_recurrent_kernel(NET, "cuda", torch.bfloat16)


@pytest.mark.parametrize(
    "capability,folder,mode,head,taken",
    [((9, 0), None, "disabled", 128, True), ((9, 0), "mine", "disabled", 128, False),
     ((9, 0), None, "strict", 128, False), ((10, 0), None, "disabled", 128, False),
     ((9, 0), None, "disabled", 256, False)],
)  # fmt: skip
def test_configurations_of_hopper_are_taken_where_the_user_names_none(
    capability: tuple[int, int], folder: str | None, mode: str, head: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = SimpleNamespace(DISABLED="disabled", FULL="full")
    cache = SimpleNamespace(FLA_CACHE_MODE=mode, FlaCacheMode=modes)
    for name, module in {"fla": None, "fla.ops": None, "fla.ops.utils": SimpleNamespace(cache=cache)}.items():
        monkeypatch.setitem(sys.modules, name, module or SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setenv("FLA_CONFIG_DIR", folder or "")
    if folder is None:
        monkeypatch.delenv("FLA_CONFIG_DIR")
    tuned.use_tuned(CPU, head)
    assert os.environ.get("FLA_CONFIG_DIR") == (str(tuned.HOPPER) if taken else folder)
    assert ("full" if taken else mode) == cache.FLA_CACHE_MODE


def test_each_configuration_has_what_fla_core_reads() -> None:
    files = sorted(tuned.HOPPER.glob("*.json"))
    assert len(files) == 9
    for file in files:
        chosen = json.loads(file.read_text())["default_config"]
        assert chosen.keys() == {"kwargs", "num_warps", "num_stages", "num_ctas"} and chosen["num_warps"] >= 1


def test_wrong_kernels_of_ours_are_replaced_by_torch(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """fla refuses its kernel; ours for it is wrong, and torch's products in its place are right."""
    found = iter(("it fails", "dq is off", None))
    monkeypatch.setattr(triton, "_refused", set())
    monkeypatch.setattr(select, "why_not", lambda *_: None)
    monkeypatch.setattr(select, "FlaDeltaRule", lambda _, own: SimpleNamespace(name="ours" if own else "fla"))
    monkeypatch.setattr(select, "use_tuned", lambda *_: None)
    monkeypatch.setattr(select, "check", lambda *_: next(found))
    monkeypatch.setattr(select, "check_rows", lambda *_: "q is off")
    with caplog.at_level("WARNING"):
        assert select._proved.__wrapped__(NET, CPU, torch.bfloat16).name == "ours"
    assert triton._refused == {"gradients within chunks", "convolution"}
    assert "torch's products run: dq is off." in caplog.text and "more slowly: q is off." in caplog.text


class _Wrong(ReferenceRecurrence):
    """The reference, with something done to what one of its methods is given or returns."""

    def __init__(self, method: str, done: Callable[..., Any]) -> None:
        super().__init__(NET)
        right = getattr(self, method)
        setattr(self, method, lambda *given: done(right, *given))


def _writes_padding(right: Callable[..., Any], rows: Any, spans: Any, states: Any, o: torch.Tensor) -> torch.Tensor:
    o[-1] = 1
    return right(rows, spans, states, o)


def _one_head_of_one_row(right: Callable[..., Any], *given: Any) -> Any:
    before, gradients = right(*given), given[5]
    gradients.g[0, 1] *= 1.2
    return before


WRONG = {
    "one head of one row": ("backward", _one_head_of_one_row),
    "a factor": ("forward", lambda right, *given: 1.02 * right(*given)),
    "no state before": ("forward", lambda right, rows, spans, states, o: right(rows, spans, None, o)),
    "written padding": ("forward", _writes_padding),
    "a transposed transition": ("summaries", lambda right, *given: (lambda own, way: (own, way.mT))(*right(*given))),
    "a state in gradients alone": ("state_gradients", lambda right, *given: torch.zeros_like(right(*given))),
    "no gradient behind": ("backward", lambda right, *given: right(*given[:4], None, *given[5:])),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_self_check_passes_a_right_kernel(dtype: torch.dtype) -> None:
    assert check(ReferenceRecurrence(NET), NET, dtype, CPU) is None


@pytest.mark.parametrize("how", WRONG)
def test_the_self_check_refuses_wrong_kernels(how: str) -> None:
    method, done = WRONG[how]
    assert "times as far off" in str(check(_Wrong(method, done), NET, torch.bfloat16, CPU))


def _halo_late(x: torch.Tensor, pieces: Any) -> Any:
    return x, replace(pieces, picked=pieces.picked.roll(1, dims=1))


def _pieces_as_one(x: torch.Tensor, pieces: Any) -> Any:
    return x, replace(pieces, spans=[(0, pieces.spans[-1][1])], continues=[True], picked=pieces.picked[:1])


def _other_channels(x: torch.Tensor, pieces: Any) -> Any:
    return x.roll(1, dims=1), pieces


@pytest.mark.parametrize("wrong", [None, _halo_late, _pieces_as_one, _other_channels])
def test_the_check_of_the_convolution(wrong: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_check.core_rows

    def rows(mixed: torch.Tensor, g: Any, beta: Any, halo: Any, weights: Any, pieces: Any, what: Any) -> Any:
        if wrong is not None and mixed.dtype != torch.float64:
            mixed, pieces = wrong(mixed, pieces)
        return right(mixed, g, beta, halo, weights, pieces, what)

    monkeypatch.setattr(self_check, "core_rows", rows)
    for dtype in (torch.float32, torch.float16):
        objection = check_rows(NET, dtype, CPU)
        assert (objection is None) == (wrong is None), objection
        assert objection is None or "off the reference in" in objection


def test_gradients_within_chunks() -> None:
    """Against autograd through the formula of a chunk, for chunks of 4 rows of pieces of 5, 1 and 4."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, key_dim, value_dim, scale = 10, 2, 3, 5, 0.7

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    leaves = [draw(1, rows, heads, key_dim).requires_grad_() for _ in range(3)]
    sums = (-draw(1, rows, heads).abs()).requires_grad_()
    (q, k, w), added, do = leaves, draw(1, rows, heads, value_dim), draw(1, rows, heads, value_dim)
    chunks = [(0, 4), (4, 5), (5, 6), (6, 10)]
    h, dh = (draw(1, len(chunks), heads, key_dim, value_dim).requires_grad_() for _ in range(2))
    du = draw(1, rows, heads, value_dim)
    total = torch.zeros(())
    for at, (begin, end) in enumerate(chunks):
        part = slice(begin, end)
        g = sums[0, part].t()
        decay = (g[:, :, None] - g[:, None]).exp().tril()
        qs, ks, us, ws = (each[0, part].transpose(0, 1) for each in (q, k, added, w))
        o = scale * (g.exp()[..., None] * (qs @ h[0, at]) + (decay * (qs @ ks.mT)) @ us)
        last = g[:, -1:]
        behind = last.exp()[..., None] * h[0, at] + (ks * (last - g).exp()[..., None]).mT @ us
        total = total + (o * do[0, part].transpose(0, 1)).sum() + (behind * dh[0, at]).sum()
        total = total - ((ws @ h[0, at]) * du[0, part].transpose(0, 1)).sum()
    expected = torch.autograd.grad(total, (q, k, w, sums))
    first, numbers = torch.tensor([0, 5, 6, 10]), torch.tensor([[0, 0], [0, 1], [1, 0], [2, 0]])
    given = [each.detach() for each in (q, k, added, do, h, dh, w, sums / torch.tensor(2.0).log(), du)]
    found = chunk_gradients(*given, scale, first, numbers, 4)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("most", [64, 128, 1024])
def test_summaries_are_composed_of_those_of_parts(most: int) -> None:
    spans = [(0, 1), (1, 130), (130, 193), (200, 500)]
    rows, _ = self_check.drawn_rows(NET, 500, torch.float64, CPU, seed=0)
    kernel = ReferenceRecurrence(NET)
    parts, counts = in_parts(spans, most)
    assert [end - begin for begin, end in parts if end - begin > most] == [] and sum(counts) == len(parts)
    found = composed(torch.cat(kernel.summaries(rows, parts), dim=-1), counts, NET.value_dim)
    expected = torch.cat(kernel.summaries(rows, spans), dim=-1)
    assert relative_error(found, expected) < 1e-12
