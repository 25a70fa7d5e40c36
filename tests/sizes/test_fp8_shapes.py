import pytest

from distca.sizes.fp8_shapes import rows_multiple, unfit_widths

LLAMA_8B = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "tp": 2, "shared": True}


@pytest.mark.parametrize(
    ("fp8", "shares", "multiple"),
    [
        ("none", 1, 1),
        ("none", 4, 4),
        ("current", 1, 32),
        ("delayed", 2, 64),
        ("blockwise", 1, 32),
        ("blockwise", 2, 256),
    ],
)
def test_rows(fp8, shares, multiple):
    assert rows_multiple(fp8, shares) == multiple


@pytest.mark.parametrize("fp8", ["none", "current", "delayed", "blockwise"])
def test_an_8b_model_fits(fp8):
    assert list(unfit_widths(fp8, **LLAMA_8B)) == []


@pytest.mark.parametrize(
    ("fp8", "changed", "said"),
    [
        ("current", {"hidden": 4088}, "the hidden size is 4088, which is not a multiple of 16;"),
        ("current", {"ffn": 48, "tp": 2}, "part of the MLP is 24, which is not a multiple of 16;"),
        ("delayed", {"heads": 2, "kv_heads": 2, "head_dim": 12}, "part of the heads is 12, which is not a multiple"),
        ("blockwise", {"hidden": 4096 + 64}, "the hidden size is 4160, which is not a multiple of 128;"),
    ],
)
def test_what_does_not_fit_is_named(fp8, changed, said):
    assert any(said in sentence for sentence in unfit_widths(fp8, **LLAMA_8B | changed))
    assert not list(unfit_widths("none", **LLAMA_8B | changed))


def test_blocks_are_whole_only_where_rows_are_gathered():
    assert not list(unfit_widths("blockwise", **LLAMA_8B | {"hidden": 4160, "shared": False}))
