"""Which checkpoints are refused before anything of them is loaded; what loads is tested with training."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from distca.errors import ConfigError, SupportError, VersionError
from distca.testing.ranks import run_ranks
from megatron_patches.checkpoint import save_load
from megatron_patches.checkpoint.unpickling import UnreadableError


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


def _refusal(folder: Path) -> str:
    path = folder if dist.get_rank() == 0 else folder / "missing"
    with pytest.raises((UnreadableError, SupportError)) as error:
        save_load._read({"model": {}}, path)
    return str(error.value)


def test_files_that_one_rank_cannot_read_are_refused_by_all_ranks(tmp_path: Path) -> None:
    save({"weight": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    others, own = run_ranks(2, _refusal, tmp_path)
    assert own.startswith(".metadata cannot be read (")
    assert others.startswith("Rank 1 refuses: ") and others.endswith(own)
