"""Recurrent layers on GPUs: kernels against float64, whole documents and pieces of them, and a model over two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distca.recurrent import CoreRows, Recurrence, choose_recurrent_kernel
from distca.recurrent.fla_delta_rule import FlaDeltaRule
from distca.recurrent.reference import ReferenceRecurrence
from distca.recurrent.self_check import check, drawn_rows
from distca.testing.reference_attention import relative_error
from distca.testing.reference_recurrence import in_pieces, spans_of
from megatron_patches.versions import has_gated_delta_net
from tests.gpu.starts import Case, Starts

pytest.importorskip("fla", reason="needs fla-core")

GPU = torch.device("cuda")
NET = Recurrence.gated_delta_net(16, 32, 128, 128)  # Qwen3.5-9B's heads
DOCUMENTS = ((1000,), (700, 1, 2, 300), (1,), (65, 64, 63), (513, 130), (1, 1, 1), (449,))
"""Rows of the pieces of documents."""
MICRO_BATCHES = ((700, 1, 2, 515), (515, 2, 1, 700), (900, 300, 18), (64, 700, 3, 450))
"""Lengths of documents."""
NO_FURTHER = 1.1


@pytest.mark.parametrize(
    "what,dtype",
    [(NET, torch.bfloat16), (Recurrence.gated_delta_net(4, 4, 64, 64), torch.float16)],
    ids=["128 in bfloat16", "64 in float16"],
)
def test_a_right_kernel_passes_with_every_seed_and_a_wrong_one_with_none(what: Recurrence, dtype: torch.dtype) -> None:
    assert choose_recurrent_kernel(what, GPU, dtype).name.startswith("fla")
    kernel = FlaDeltaRule(what, own_gradients=True)
    for seed in range(5):
        assert check(kernel, what, dtype, GPU, seed) is None
    assert check(FlaDeltaRule(replace(what, scale=1.05 * what.scale), True), what, dtype, GPU) is not None


def test_pieces_are_no_further_from_float64_than_whole_documents() -> None:
    kernel = choose_recurrent_kernel(NET, GPU, torch.bfloat16)
    documents = spans_of(DOCUMENTS)
    rows, do = drawn_rows(NET, documents[-1][-1][1], torch.bfloat16, GPU, seed=0)
    whole = [[(spans[0][0], spans[-1][1])] for spans in documents]
    exact = in_pieces(ReferenceRecurrence(NET), CoreRows(*(each.double() for each in rows.all)), do.double(), whole)
    one_rank, cut = (in_pieces(kernel, rows, do, each) for each in (whole, documents))
    for name, expected in exact.items():
        limit = NO_FURTHER * relative_error(one_rank[name], expected)
        assert relative_error(cut[name], expected) <= limit, name


def test_summaries_of_parts_are_no_further_from_float64_than_whole_ones() -> None:
    whole, parts = (FlaDeltaRule(NET, summary_rows=rows) for rows in (8192, 256))
    rows, _ = drawn_rows(NET, 3000, torch.bfloat16, GPU, seed=0)
    spans = [(0, 1), (1, 1000), (1000, 3000)]
    exact = ReferenceRecurrence(NET).summaries(CoreRows(*(each.double() for each in rows.all)), spans)
    for one, other, expected in zip(*(each.summaries(rows, spans) for each in (whole, parts)), exact, strict=True):
        assert relative_error(other, expected) <= NO_FURTHER * relative_error(one, expected)


def _errors(device: torch.device | None = None, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """How far a hybrid block is from float64 on as many ranks as call this, root mean squares over all micro-batches
    and weights. A single bias or decay of few heads is up to 1.5 times as far in one run as in another."""
    from distca.parity import block, suite
    from tests.parity.float32_casts import float32_casts_lifted
    from tests.parity.hybrid_cases import hybrid_cases

    case = hybrid_cases()[0]
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}
    shape = replace(suite.GPU_SHAPE, layers=3)
    case = replace(case, tp=1, recompute="none", config=case.config | heads, shape=shape)
    device = device or torch.device("cuda", torch.cuda.current_device())
    squares: dict[str, list[float]] = {"output": [], "input_gradient": [], "weight_gradients": []}
    for lengths in MICRO_BATCHES:
        case = replace(case, micro_batches=(lengths,))
        full = block.rounded_weights(case, dtype)
        with float32_casts_lifted():
            exact = block.block_unmodified(case, torch.float64, device, full)
        found = block.block_disaggregated(case, dtype, device, "auto", full)
        squares["output"].append(relative_error(found.output, exact.output) ** 2)
        squares["input_gradient"].append(relative_error(found.input_gradient, exact.input_gradient) ** 2)
        for name, expected in exact.weight_gradients.items():
            squares["weight_gradients"].append(relative_error(found.weight_gradients[name], expected) ** 2)
    return {what: (sum(each) / len(each)) ** 0.5 for what, each in squares.items()}


def cases(_: Path) -> dict[str, Case]:
    # Each rank looks for its kernels' fastest shapes, which takes a minute or more.
    name = test_two_ranks_are_no_further_from_float64_than_one.__name__
    return {f"{name}: {ranks}": Case(ranks, _errors, limit_s=600) for ranks in (1, 2)}


@pytest.mark.gpu
@pytest.mark.skipif(not has_gated_delta_net(), reason="Gated delta nets are served with Megatron-Core 0.19")
def test_two_ranks_are_no_further_from_float64_than_one(starts: Starts) -> None:
    name = test_two_ranks_are_no_further_from_float64_than_one.__name__
    (one,), (two, _) = (starts.result(f"{name}: {ranks}") for ranks in (1, 2))
    assert one and all(0 < two[name] <= NO_FURTHER * error for name, error in one.items()), (one, two)
