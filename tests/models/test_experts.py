"""Experts in a model's shape: what cannot work is said, and weights are counted as Megatron's models have them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distca.models.experts import Experts
from distca.models.shape import ModelShape

DENSE = ModelShape(layers=4, hidden=16, ffn=48, heads=4, kv_heads=2)
SOME = Experts(count=8, topk=2, ffn=8)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"count": 0}, "topk is 3, but count is 0, and a dense model has none; set count"),
        ({"ffn": 0}, "ffn is 0, but the model has experts"),
        ({"topk": 9}, "topk is 9; it must be at least 1 and at most count, which is 8."),
        ({"topk": 0}, "topk is 0; it must be at least 1"),
        ({"dense_layers": 4}, "dense_layers is 4, but the model has 4 layers, so none has experts"),
        ({"shared_gate": True}, "shared_gate is true, but shared_ffn is 0"),
        ({"scale": 0.0}, "scale is 0; it must be a number above 0."),
        ({"score": "sigmoid", "normalize": False}, "but scores of several sigmoids are always normalised"),
        ({"topk": 1}, "normalize is true, but topk is 1, whose score would always be 1"),
        ({"topk": 1, "score": "sigmoid"}, "normalize is true, but topk is 1, whose score would always be 1"),
        ({"bias": True}, "bias is true, but score is softmax, which has none"),
        ({"groups": 4}, "chosen_groups is 0 and groups is 4; give 1 to groups of them"),
        ({"groups": 3, "chosen_groups": 1}, "groups is 3, which does not divide count 8"),
        ({"clamp": -1.0}, "clamp is -1; it must be a number from 0 on."),
        ({"biases": True, "dense_layers": 1}, "dense_layers is 1, but with biases or clamp all layers have experts"),
        ({"groups": 4, "chosen_groups": 2}, "chosen_groups is 2, but topk is 3"),
        ({"groups": 4, "chosen_groups": 1}, "at most the 2 that it has"),
    ],
)
def test_what_cannot_work_is_said(changes: dict[str, object], said: str) -> None:
    experts = replace(SOME, **{"topk": 3, **changes})
    if not experts.count:
        experts = Experts(topk=3)
    found = experts.problems(layers=4)
    assert len(found) == 1 and said in found[0], found


def test_published_routers_can_work() -> None:
    assert not Experts().problems(1)
    assert not SOME.problems(4)
    deepseek = Experts(
        count=256, topk=8, ffn=2048, dense_layers=3, shared_ffn=2048, score="sigmoid", bias=True, groups=8,
        chosen_groups=4, scale=2.5,
    )  # fmt: skip
    assert not deepseek.problems(61)
    assert not replace(SOME, topk=1, score="sigmoid", normalize=False).problems(4)


def test_which_layers_have_experts() -> None:
    shape = replace(DENSE, experts=replace(SOME, dense_layers=1, shared_ffn=24, shared_gate=True))
    kinds = shape.layer_kinds
    assert [kind.mlp.experts.count for kind in kinds] == [0, 8, 8, 8]
    assert [kind.mlp.ffn for kind in kinds] == [48, 24, 24, 24]
    dense, mixture = kinds[0].mlp, kinds[1].mlp
    assert dense.weights(16) == dense.held(16) == 3 * 16 * 48
    assert mixture.weights(16) == 3 * 16 * 24 + 16 * 9 + 2 * 3 * 16 * 8
    assert mixture.held(16) == 3 * 16 * 24 + 16 * 9 + 8 * 3 * 16 * 8


def test_a_dense_shape_counts_as_before() -> None:
    assert DENSE.held_weights == DENSE.matmul_weights == 4 * (16 * 4 * 12 + 3 * 16 * 48)


def test_published_sizes() -> None:
    """Parameters of Qwen3-30B-A3B and 235B-A22B as published, of which a token uses 3.3 and 22.2 billion."""
    for shape, total, active in (
        (_qwen(48, 2048, 32, 768), 30.5e9, 3.3e9),
        (_qwen(94, 4096, 64, 1536), 235e9, 22e9),
    ):
        tables = 2 * 151_936 * shape.hidden
        assert shape.held_weights + tables == pytest.approx(total, rel=0.01)
        assert shape.matmul_weights + tables == pytest.approx(active, rel=0.02)


def _qwen(layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    experts = Experts(count=128, topk=8, ffn=ffn)
    return ModelShape(
        layers=layers, hidden=hidden, ffn=3 * hidden, heads=heads, kv_heads=4, head_dim=128, experts=experts
    )
