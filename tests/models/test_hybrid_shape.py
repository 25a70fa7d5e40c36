"""Weights of the shapes of hybrid stacks."""

from dataclasses import replace

from distca.models.hybrid import Hybrid
from distca.simulate import MODELS


def test_mlp_weights_of_a_hybrid_are_those_of_its_mlps() -> None:
    hybrid = Hybrid(pattern="G-G-G-*-", key_heads=16, value_heads=32)
    shape = replace(MODELS["8b"], layers=8, hybrid=hybrid)
    assert shape.mlp_weights == 4 * 3 * shape.hidden * shape.ffn // 8
