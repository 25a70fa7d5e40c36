"""Inverse frequencies of rotary positions, for every kind of scaling.

Shapes: N rows; E pairs of a head's elements that positions turn. Arithmetic is float32 throughout, in the order in
which transformers rounds it: at position 100,000 one more rounding of a frequency turns a head by a hundredth.
"""

from __future__ import annotations

import math

import torch

from distca.models.rope import RopeScaling


def inverse_frequencies(dims: int, base: float, scaling: RopeScaling) -> torch.Tensor:
    """[E] float32: the angle that every pair turns per position, where ``dims`` elements of a head turn.

    Kinds of scaling that go by a document's length have those of documents of up to original_length."""
    plain_E = 1.0 / _periods(dims, base)
    if scaling.kind == "linear":
        return plain_E / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain_E, scaling)
    if scaling.kind == "yarn":
        return _yarn(dims, base, scaling)
    if scaling.kind == "longrope":
        return 1.0 / (torch.tensor(scaling.short_factors) * _periods(dims, base))
    return plain_E


def frequencies_by_length(dims: int, base: float, scaling: RopeScaling, lengths_N: torch.Tensor) -> torch.Tensor:
    """[N, E] float32 inverse frequencies of rows whose documents have different lengths.

    Args:
        dims: elements of a head that positions turn, two for each pair.
        base: of frequencies of short documents.
        scaling: that goes by the length of documents.
        lengths_N: int64 tokens of each row's document.
    """
    if scaling.kind == "longrope":
        short_E, long_E = (
            1.0 / (torch.tensor(factors, device=lengths_N.device) * _periods(dims, base).to(lengths_N.device))
            for factors in (scaling.short_factors, scaling.long_factors)
        )
        return torch.where((lengths_N > scaling.original_length)[:, None], long_E, short_E)
    factor, original = scaling.factor, scaling.original_length
    longer_N = lengths_N.clamp(min=original)
    stretch_N = factor * longer_N / original - (factor - 1)
    base_N = base * stretch_N ** (dims / (dims - 2))
    return 1.0 / base_N[:, None] ** _exponents(dims).to(lengths_N.device)


def _exponents(dims: int) -> torch.Tensor:
    return torch.arange(0, dims, 2, dtype=torch.float32) / dims


def _periods(dims: int, base: float) -> torch.Tensor:
    return base ** _exponents(dims)


def _llama3(plain_E: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_length
    wavelength_E = 2 * math.pi / plain_E
    divided_E = torch.where(wavelength_E > original / low, plain_E / scaling.factor, plain_E)
    kept_E = (original / wavelength_E - low) / (high - low)
    between_E = (1 - kept_E) * divided_E / scaling.factor + kept_E * divided_E
    is_between_E = (wavelength_E >= original / high) & (wavelength_E <= original / low)
    return torch.where(is_between_E, between_E, divided_E)


def _yarn(dims: int, base: float, scaling: RopeScaling) -> torch.Tensor:
    first, last = (_pair_that_turns(turns, dims, base, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp_E = ((torch.arange(dims // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    periods_E, kept_E = _periods(dims, base), 1 - ramp_E
    return 1.0 / (scaling.factor * periods_E) * (1 - kept_E) + 1.0 / periods_E * kept_E


def _pair_that_turns(turns: float, dims: int, base: float, scaling: RopeScaling) -> float:
    """Number of the pair that turns ``turns`` times over the original context."""
    return dims * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
