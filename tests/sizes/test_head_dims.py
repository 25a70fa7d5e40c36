"""Which head dimensions are taken, and that all who ask are told the same."""

import pytest
import torch

from distca.attention import AttentionSpec, select
from distca.commands.options import check_head_dim
from distca.errors import OptionError
from distca.sizes.head_dims import unserved, unserved_by
from distca.train.config.schema import ModelConfig
from distca.train.config.validate_models import _heads

RIGHT = (24, 32, 56, 64, 88, 96, 120, *range(128, 257, 8))


def test_flash_attn_4_is_taken_where_it_was_proved_only() -> None:
    """Its backward is off by 100 % for 16, 40, 48, 72, 80, 104 and 112, and others were never run."""
    assert tuple(dim for dim in range(1, 513) if unserved_by("flash4", dim) is None) == RIGHT
    forward = {dim for dim in range(1, 513) if unserved_by("flash4", dim, direction="forward") is None}
    assert forward - set(RIGHT) == {16, 40, 48, 72, 80, 104, 112} and forward > set(RIGHT)


def test_torchs_kernel_and_the_reference() -> None:
    assert [dim for dim in range(1, 513) if unserved_by("torch", dim) is None] == list(range(8, 257, 8))
    assert all(unserved_by("reference", dim) is None for dim in (2, 10, 300))


def test_values_narrower_than_keys() -> None:
    assert unserved_by("flash4", 192, 128) is None and unserved_by("reference", 12, 6) is None
    assert unserved_by("flash4", 128, 128) is None
    for kernel, key_dim, value_dim in (("flash4", 128, 64), ("torch", 192, 128)):
        objection = f"it was not proved for keys of {key_dim} and values of {value_dim}"
        assert unserved_by(kernel, key_dim, value_dim) == objection


@pytest.mark.parametrize("head_dim", [1, 7, 65])
def test_commands_and_settings_refuse_the_same(head_dim) -> None:
    assert unserved(head_dim) == f"{head_dim}, but rotary positions need an even one"
    with pytest.raises(OptionError, match=f"--head_dim is {unserved(head_dim)}"):
        check_head_dim(head_dim)
    problems = _heads(ModelConfig(head_dim=head_dim))
    assert problems == [
        f"The head dimension is {unserved(head_dim)}; change model.head_dim, or model.hidden or model.heads."
    ]


@pytest.mark.parametrize("head_dim", [8, 10, 40, 128])
def test_commands_and_settings_take_the_same(head_dim) -> None:
    check_head_dim(head_dim)
    assert unserved(head_dim) is None and _heads(ModelConfig(head_dim=head_dim)) == []


def test_a_kernel_is_not_chosen_for_a_dimension_it_is_wrong_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_installed", lambda module: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def reason(head_dim, kernel="flash4"):
        return select.why_not(kernel, AttentionSpec(8, 2, head_dim, torch.bfloat16, torch.device("cuda")))

    assert reason(128) is None and reason(256) is None
    assert str(reason(48)).startswith("its backward was not proved for head dimension 48, only for 24, 32, 56")
    assert reason(48, "flash4+torch") is None and reason(8, "flash4+torch") == reason(8)
    assert reason(260, "flash4+torch") == reason(260) and reason(260, "torch+reference") == reason(260, "torch")
