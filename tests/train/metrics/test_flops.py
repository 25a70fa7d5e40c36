from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from distca.models.hybrid import Hybrid
from distca.models.variant import Variant
from distca.train.config.schema import ModelConfig
from distca.train.metrics.flops import ModelFlops, mfu, model_flops, peak_seconds

MODEL = ModelConfig(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16)


def test_linear_flops_are_those_that_torch_counts() -> None:
    """Forward and backward of one layer's matrices and the output layer, on torch's own counter."""
    tokens, vocabulary = 10, 50
    query, key_value = MODEL.heads * 16, MODEL.kv_heads * 16
    shapes = [(32, query + 2 * key_value), (query, 32), (32, 2 * MODEL.ffn), (MODEL.ffn, 32)] * MODEL.layers
    with FlopCounterMode(display=False) as counter:
        for rows, columns in [*shapes, (32, vocabulary)]:
            x = torch.randn(tokens, rows, requires_grad=True)
            (x @ torch.randn(rows, columns, requires_grad=True)).sum().backward()
    flops = model_flops(MODEL, vocabulary, [tokens])
    assert flops.linear + flops.logits == counter.get_total_flops()


@pytest.mark.parametrize("mixer", "GM")
def test_recurrent_flops_are_those_that_torch_counts(mixer: str) -> None:
    """Forward of both projections, of the convolution and of the core, one row after the other."""
    hybrid = Hybrid(pattern=f"{mixer}*", key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    model = replace(MODEL, hybrid=hybrid)
    tokens, heads, keys, values = 10, 4, 8, 16
    channels, gates = 2 * 2 * 8 + 4 * 16, 4 * (2 if mixer == "G" else 1)
    state = torch.zeros(heads, keys, values)
    with FlopCounterMode(display=False) as counter:
        _ = torch.randn(tokens, 32) @ torch.randn(32, channels + heads * values + gates)
        _ = torch.randn(tokens, heads * values) @ torch.randn(heads * values, 32)
        weights = counter.get_total_flops()
        kernel, padded = torch.randn(channels, 1, 4), torch.randn(1, channels, tokens + 3)
        torch.nn.functional.conv1d(padded, kernel, groups=channels)
        for _ in range(tokens):
            q, k, v = torch.randn(heads, 1, keys), torch.randn(heads, keys, 1), torch.randn(heads, 1, values)
            held = k.mT @ state if mixer == "G" else 0
            state = state + k @ (v - held)
            _ = q @ state
    kind = model.layer_kinds[0]
    assert 2 * model.mixer_weights(kind) * tokens == weights
    assert model_flops(model, 50, [tokens - 3, 3]).recurrent == 3 * (counter.get_total_flops() - weights)


def test_llama_8b_has_the_weights_of_its_paper() -> None:
    model = ModelConfig(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8)
    # 8.03e9 in all, less embedding, output layer and the norms.
    assert model.matmul_weights == 8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096
    without_gates = replace(model, variant=Variant(activation="relu2", gated=False))
    assert model.matmul_weights - without_gates.matmul_weights == 32 * 4096 * 14336


@given(st.lists(st.integers(1, 300), max_size=6))
def test_attention_counts_every_causal_pair(lengths: list[int]) -> None:
    pairs = sum(sum(range(1, length + 1)) for length in lengths)
    assert model_flops(MODEL, 50, lengths).attention == 3 * 4 * 2 * 4 * 16 * pairs


def test_a_long_document_costs_more_than_its_tokens_in_short_ones() -> None:
    long, short = model_flops(MODEL, 50, [1 << 20]), model_flops(MODEL, 50, [1 << 10] * (1 << 10))
    assert (long.linear, long.logits) == (short.linear, short.logits)
    assert long.attention / short.attention == pytest.approx(1 << 10, rel=1e-2)


BILLION = ModelFlops(linear=3 * 10**9, logits=2 * 10**9, attention=10**9)


@pytest.mark.parametrize(
    "device,peak",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ],
)
def test_peaks_by_device_name(device: str, peak: float) -> None:
    assert peak_seconds(BILLION, device, "bf16", "none") == pytest.approx(6e9 / peak)


def test_linear_layers_in_fp8_have_its_peak() -> None:
    assert peak_seconds(BILLION, "NVIDIA H200", "bf16", "current") == pytest.approx(3e9 / 1979e12 + 3e9 / 989e12)


def test_no_peak_is_known() -> None:
    assert peak_seconds(BILLION, "NVIDIA H200", "fp32", "none") is None
    assert peak_seconds(BILLION, "cpu", "bf16", "none") is None
    assert peak_seconds(BILLION, "NVIDIA A100-SXM4-80GB", "bf16", "current") is None


def test_mfu() -> None:
    assert mfu(4.0, 2.0, 4) == 0.5
    assert mfu(None, 2.0, 4) is None
