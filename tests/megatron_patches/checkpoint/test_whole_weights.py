"""What cannot be read of a checkpoint's weights, and what is never run; what can is tested with folders."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from benchmarks import family_models
from distca.errors import ModelError
from distca.models.description import ModelDescription, describe_folder
from megatron_patches.checkpoint.unpickling import UnreadableError
from megatron_patches.checkpoint.whole_weights import SavedWeights

NAME = "embedding.word_embeddings.weight"
NORM = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"


class _Runs:
    """Runs a shell command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, ModelDescription]:
    """A checkpoint that has the embedding, and what it is of."""
    family_models.write_folder("llama", tmp_path / "first")
    tensors = {NAME: torch.ones(family_models.VOCABULARY, 32)}
    save(tensors, storage_writer=FileSystemWriter(tmp_path / "saved"), no_dist=True)
    return tmp_path / "saved", describe_folder(tmp_path / "first")


def test_a_command_is_not_run_when_the_checkpoint_is_opened(
    tmp_path: Path, saved: tuple[Path, ModelDescription]
) -> None:
    path, model = saved
    (path / ".metadata").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    with pytest.raises(UnreadableError, match=r"^it names posix\.system, which is no part of a checkpoint"):
        SavedWeights(path, model)
    assert not (tmp_path / "ran").exists()


def test_a_description_that_is_exchanged_later_is_not_read(
    tmp_path: Path, saved: tuple[Path, ModelDescription]
) -> None:
    path, model = saved
    weights = SavedWeights(path, model).tensors()
    (path / ".metadata").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    assert torch.equal(next(weights)[1], torch.ones(family_models.VOCABULARY, 32))
    assert not (tmp_path / "ran").exists()


def test_a_command_is_not_run_when_a_tensor_is_read(tmp_path: Path, saved: tuple[Path, ModelDescription]) -> None:
    path, model = saved
    weights = SavedWeights(path, model).tensors()
    torch.save(_Runs(tmp_path / "ran"), next(path.glob("*.distcp")))
    with pytest.raises(UnreadableError):
        next(weights)
    assert not (tmp_path / "ran").exists()


def test_a_shard_that_is_cut_off_is_unreadable(saved: tuple[Path, ModelDescription]) -> None:
    path, model = saved
    (name, tensor) = next(SavedWeights(path, model).tensors())
    assert name == "model.embed_tokens.weight" and torch.equal(tensor, torch.ones(family_models.VOCABULARY, 32))
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:500])
    with pytest.raises(UnreadableError):
        next(SavedWeights(path, model).tensors())


@pytest.mark.parametrize("layers", [1, 3])
def test_a_checkpoint_with_another_number_of_layers_is_refused(
    tmp_path: Path, saved: tuple[Path, ModelDescription], layers: int
) -> None:
    _, model = saved
    assert model.layers == 2
    tensors = {NAME: torch.ones(family_models.VOCABULARY, 32), NORM: torch.ones(layers, 32)}
    save(tensors, storage_writer=FileSystemWriter(tmp_path / "other"), no_dist=True)
    with pytest.raises(ModelError, match=rf"shape \[{layers}, 32\] for {NORM}, but .* would be 2\."):
        list(SavedWeights(tmp_path / "other", model).tensors())


def test_a_checkpoint_with_fewer_token_ids_than_the_model_is_refused(saved: tuple[Path, ModelDescription]) -> None:
    path, model = saved
    known = family_models.VOCABULARY
    with pytest.raises(ModelError, match=rf"has shape \[{known}, 32\] for model\.embed_tokens\.weight, .* \[80, 32\]"):
        next(SavedWeights(path, replace(model, vocabulary=80)).tensors())


def test_a_checkpoint_with_fewer_heads_than_the_model_is_refused(
    tmp_path: Path, saved: tuple[Path, ModelDescription]
) -> None:
    _, model = saved
    name = "decoder.layers.self_attention.linear_qkv.weight"
    tensors = {NAME: torch.ones(family_models.VOCABULARY, 32), NORM: torch.ones(2, 32), name: torch.ones(2, 64, 32)}
    save(tensors, storage_writer=FileSystemWriter(tmp_path / "other"), no_dist=True)
    with pytest.raises(ModelError, match=rf"has shape \[64, 32\] for {name}, which does not fit the model"):
        list(SavedWeights(tmp_path / "other", replace(model, heads=8)).tensors())


def test_a_checkpoint_with_a_key_for_each_layer_and_more_layers_is_refused(tmp_path: Path) -> None:
    """As checkpoints of models with experts have."""
    family_models.write_folder("mixtral", tmp_path / "first")
    model = describe_folder(tmp_path / "first")
    tensors = {f"decoder.layers.{layer}.mlp.router.weight": torch.ones(2, 2) for layer in range(model.layers + 1)}
    save(tensors, storage_writer=FileSystemWriter(tmp_path / "other"), no_dist=True)
    said = f"has {model.layers + 1} layers, but the model .* has {model.layers}"
    with pytest.raises(ModelError, match=said):
        next(SavedWeights(tmp_path / "other", model).tensors())
