"""Which checkpoints are refused before anything of them is loaded; what loads is tested with training."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from distca.errors import ConfigError, VersionError
from megatron_patches.checkpoint import save_load


@pytest.mark.parametrize("older", [True, False])
def test_an_older_megatron_refuses_what_a_newer_one_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    monkeypatch.setattr(save_load, "find_spec", lambda name: older or None)
    if older:
        with pytest.raises(VersionError, match=r"was saved with a newer megatron-core than \d"):
            save_load._check_readable(tmp_path)
        (tmp_path / "common.pt").touch()
    save_load._check_readable(tmp_path)


@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_with_another_shape_is_refused(tmp_path: Path, gated: bool) -> None:
    """A weight of gate and up projection too, which Megatron describes as a factory of two tensors."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    weight = ShardedTensor.from_rank_offsets("fc1.weight", torch.zeros(8, 4))
    model = {"weight": apply_swiglu_sharded_factory(weight, ()) if gated else weight}

    def check(*size: int) -> None:
        saved = TensorStorageMetadata(TensorProperties(), torch.Size(size), [])
        save_load._check_shapes(model, Metadata({"fc1.weight": saved, "other": BytesStorageMetadata()}), tmp_path)

    check(8, 4)
    with pytest.raises(ConfigError, match=r"has shape \[6, 4\] for fc1\.weight, and the model needs shape \[8, 4\]"):
        check(6, 4)
