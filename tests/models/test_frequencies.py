"""Inverse frequencies against those of transformers, at the sizes of real models: equal to the last bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distca.models.description import describe
from distca.models.frequencies import frequencies_by_length, inverse_frequencies

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
CASES = {
    "LLaMA 3.1": {"rope_type": "llama3", "rope_theta": 500000.0, **_LLAMA3},
    "LLaMA 3.2": {"rope_type": "llama3", "rope_theta": 500000.0, **_LLAMA3, "factor": 32.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "Qwen2.5": {"rope_type": "yarn", "rope_theta": 1000000.0, **_YARN},
    "yarn with everything": {
        "rope_type": "yarn",
        "rope_theta": 12345.6,
        **_YARN,
        "attention_factor": 1.25,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn with magnitudes": {"rope_type": "yarn", "rope_theta": 1e4, **_YARN, "mscale": 1.2, "mscale_all_dim": 0.7},
}


def _theirs(kind: str) -> Callable[..., tuple[torch.Tensor, float]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # which takes half a second

    found: Callable[..., tuple[torch.Tensor, float]] = ROPE_INIT_FUNCTIONS[kind]
    return found


def _config(rope: dict, positions: int = 131072) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        rope_parameters=dict(rope),
    )


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_attention_factor(name: str) -> None:
    config = _config(CASES[name])
    theirs, factor = _theirs(CASES[name]["rope_type"])(config, "cpu")
    ours = describe(config.to_dict(), name)
    assert torch.equal(inverse_frequencies(128, ours.rope_base, ours.rope_scaling), theirs)
    assert ours.rope_scaling.resolved_attention_factor == pytest.approx(factor, rel=1e-15)


def test_dynamic_frequencies_go_by_the_length() -> None:
    config = _config({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, positions=4096)
    ours, lengths = describe(config.to_dict(), "config.json"), torch.tensor([1, 4096, 4097, 10000, 131072])
    rows = frequencies_by_length(128, ours.rope_base, ours.rope_scaling, lengths)
    for length, row in zip(lengths, rows, strict=True):
        theirs, _ = _theirs("dynamic")(config, "cpu", seq_len=length)
        assert torch.allclose(row, theirs, rtol=5e-7, atol=0), "one rounding of the base"
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[1], rows[2])
