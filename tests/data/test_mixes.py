from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.commands.lengths import read_lengths
from distca.data import open_source
from distca.data.mixes import (
    LONG_CONTEXT,
    MIX_NAMES,
    long_context,
    sample_documents,
    sample_lengths,
    sample_long_context,
    sample_mix,
)
from distca.errors import MixError


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(("pretrain", "prolong")),
    st.integers(0, 500_000),
    st.integers(0, 1000),
    st.none() | st.integers(1, 5000),
)
def test_lengths_hold_exactly_the_tokens(mix: str, tokens: int, seed: int, max_length: int | None) -> None:
    lengths = sample_lengths(mix, tokens, seed, max_length=max_length)
    assert lengths.dtype == np.int64
    assert lengths.sum() == tokens
    assert (lengths >= 1).all()
    assert np.array_equal(lengths, sample_lengths(mix, tokens, seed, max_length=max_length))
    if max_length is not None:
        assert lengths.max(initial=0) <= max_length


@pytest.mark.parametrize("mix, longest", [("pretrain", 124_914), ("prolong", 340_150)])
def test_samples_look_like_their_mix(mix: str, longest: int) -> None:
    text = resources.files("distca.data").joinpath("mixes", f"{mix}.csv").read_text()
    rows = np.array([line.split(",") for line in text.splitlines()[3:]], float)
    mean = (rows[:, 2] * rows[:, 3]).sum() / rows[:, 2].sum()
    lengths = sample_lengths(mix, 100_000_000, 0)
    assert abs(lengths.mean() / mean - 1) < 0.05
    assert longest / 2 < lengths.max() < longest
    share = (lengths < rows[20, 0]).mean()
    assert abs(share - rows[:20, 2].sum() / rows[:, 2].sum()) < 0.02


def test_seeds_differ() -> None:
    assert not np.array_equal(sample_lengths("pretrain", 10**6, 0)[:20], sample_lengths("pretrain", 10**6, 1)[:20])


@pytest.mark.parametrize("context", [65_536, 131_072, 262_144, 524_288])
def test_long_context_thins_out_short_documents_and_stretches_all(context: int) -> None:
    lengths = np.concatenate((np.arange(1, 2001), [70_000, 100_000]))
    stretched = long_context(lengths, context, seed=0)
    factor = context // 65_536
    # 1000 of 2000 short documents stay, each of two long ones comes four times, cut to the context.
    assert len(stretched) == 1000 + 8
    assert (stretched == min(70_000 * factor, context)).sum() >= 4
    assert stretched.max() == context
    short = stretched[stretched <= 2000 * factor]
    assert len(short) == len(np.unique(short)) == 1000
    assert (short % factor == 0).all()
    assert np.array_equal(stretched, long_context(lengths, context, seed=0))
    assert not np.array_equal(stretched, long_context(lengths, context, seed=1))


@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
@pytest.mark.parametrize("context", [2048, 131_072, 262_144])
def test_a_long_context_sample_has_exactly_the_tokens_and_keeps_its_shape(mix: str, context: int) -> None:
    tokens = 64 * context + 5
    lengths = sample_long_context(mix, tokens, context, seed=3)
    assert lengths.sum() == tokens and lengths.min() >= 1 and lengths.max() == context
    assert np.array_equal(lengths, sample_long_context(mix, tokens, context, seed=3))
    # Documents of the whole context hold as large a share of the tokens as at 128K, whatever the context.
    share = (lengths == context).sum() * context / tokens
    usual = sample_long_context(mix, 64 * 131_072, 131_072, seed=3)
    assert abs(share - (usual == 131_072).sum() * 131_072 / usual.sum()) < 0.15
    assert len(sample_long_context(mix, 0, context, seed=3)) == 0


def test_mistakes_are_sentences() -> None:
    with pytest.raises(MixError, match="no mix 'web'; choose one of pretrain, prolong"):
        sample_lengths("web", 10, 0)
    for draw in (sample_lengths, lambda mix, tokens, seed: sample_long_context(mix, tokens, 131_072, seed)):
        with pytest.raises(MixError, match="Cannot draw -1"):
            draw("pretrain", -1, 0)
        with pytest.raises(MixError, match="no mix 'web'"):
            draw("web", 0, 0)
    with pytest.raises(MixError, match="max_length is 0"):
        sample_lengths("pretrain", 10, 0, max_length=0)
    with pytest.raises(MixError, match="context is 1,000"):
        long_context(np.array([5]), 1000, 0)


@pytest.mark.parametrize("name", MIX_NAMES)
def test_every_name_is_drawn_and_training_and_commands_know_the_same_ones(name: str) -> None:
    tokens = 4 * 131_072
    drawn, cut = sample_mix(name, tokens, 3), sample_mix(name, tokens, 3, context=2048)
    assert drawn.sum() == cut.sum() == tokens and cut.max() <= 2048
    if name.endswith("-long"):
        mix = name.removesuffix("-long")
        assert drawn.tolist() == sample_long_context(mix, tokens, LONG_CONTEXT, 3).tolist()  # type: ignore[arg-type]
    else:
        assert drawn.tolist() == sample_lengths(name, tokens, 3).tolist()  # type: ignore[arg-type]
    of_source = open_source("mix", name, seed=3, mix_tokens=tokens, max_length=2048).lengths
    assert of_source.tolist() == sample_documents(name, tokens, 3, context=2048).tolist()
    assert (of_source.tolist() == cut.tolist()) == name.endswith("-long")
    assert read_lengths(name, tokens=tokens, seed=3).tolist() == drawn.tolist()


def test_an_unknown_name_is_answered_with_all_names() -> None:
    with pytest.raises(MixError, match="choose one of pretrain, prolong, pretrain-long, prolong-long"):
        sample_mix("web-long", 10, 0)
