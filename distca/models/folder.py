"""Writing a Hugging Face folder: tensors in several files, config.json, and what came along with the first one."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from distca.errors import ConfigError, VersionError, system_words
from distca.models.description import CONFIG, ModelDescription, architecture
from distca.models.layout import expected_shapes
from distca.models.tensors import INDEX, SINGLE

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 << 30
"""Of one file at most, unless one tensor alone has more; so much is in host memory at a time."""

VALUE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)
"""Tokenizer, chat templates and generation settings; code that may lie beside them stays behind."""


PARTIAL = ".partial"
"""Of a folder, where its files are until all of them are written."""


def check_empty(folder: Path, setting: str) -> None:
    """Refuse a folder that holds something, or that cannot be made or written; one that is missing stays so. What a
    killed writer left is nothing: :func:`begin` deletes it, and what was in place is written again.

    Raises:
        ConfigError: naming ``setting``.
    """
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        full = not (folder / PARTIAL).is_dir() and any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{setting} is {folder}, which cannot be made or read ({system_words(error)}).") from None
    if full:
        raise ConfigError(f"{setting} is {folder}, which is not empty; name an empty folder, or one that is not there.")
    try:
        with TemporaryFile(dir=folder):  # permissions alone do not say it
            pass
    except OSError as error:
        raise ConfigError(
            f"{setting} is {folder}, but nothing can be written into it ({system_words(error)}); let this user write "
            "there, or name another folder."
        ) from None
    for each in missing:
        each.rmdir()


def is_written(folder: Path, after: Path) -> bool:
    """Whether the folder is whole, and no older than a file: :func:`finish` puts its config.json in place last."""
    last = folder / CONFIG
    return last.is_file() and last.stat().st_mtime >= after.stat().st_mtime


def begin(folder: Path) -> None:
    """Make room for what :func:`finish` will put in place; OSError where that fails."""
    clear(folder)
    (folder / PARTIAL).mkdir(parents=True, exist_ok=True)


def clear(folder: Path) -> None:
    """Delete what was written of a folder and not put in place."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def config_fields(model: ModelDescription, dtype: str, first: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json.

    Args:
        model: what it describes.
        dtype: of the tensors, such as "bfloat16".
        first: the config.json that training began with, of which all else is kept; empty where there was none.
    """
    fields = {name: value for name, value in first.items() if name not in _REPLACED}
    fields |= {
        "architectures": [architecture(model.family)],
        "model_type": model.family,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.positions,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "sliding_window": None,
        "dtype" if "dtype" in first else "torch_dtype": dtype,
    }
    scaling, rope = _scaling_fields(model), dict[str, Any]()
    if "rope_parameters" in first:
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base, **scaling}}
    else:  # version 5 reads the older fields too, and version 4 reads no others
        rope = {"rope_theta": model.rope_base, "rope_scaling": scaling or None}
    return fields | rope


_REPLACED = {
    "dtype",
    "torch_dtype",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
}


def _scaling_fields(model: ModelDescription) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling.kind == "none":
        return {}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        fields |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        if scaling.attention_factor is not None:  # else a later extension by another factor would keep it
            fields["attention_factor"] = scaling.attention_factor
    return fields


def copy_companions(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, chat templates and generation settings; returns the names that were there."""
    there = [
        str(file.relative_to(source)) for name in COMPANIONS for file in sorted(source.glob(name)) if file.is_file()
    ]
    for name in there:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    return there


@dataclass(frozen=True)
class ExportedModel:
    """A folder to be written.

    Attributes:
        model: what it describes.
        fields: content of its config.json.
        dtype: of its tensors, such as "bfloat16".
        source: the folder that training began with, for tokenizer, chat template and generation settings; None where
            there was none.
    """

    model: ModelDescription
    fields: Mapping[str, Any]
    dtype: str
    source: Path | None = None


class ShardWriter:
    """Writes tensors into numbered files, each as soon as it is full.

    Args:
        folder: for which :func:`begin` made room.
        first: number of the first file.
        files: how many there are in all, by all writers.
    """

    def __init__(self, folder: Path, first: int, files: int) -> None:
        self._folder, self._number, self._files = folder / PARTIAL, first, files
        self._held: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self.file_of: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, of the type in which it is written; OSError where that cannot be done."""
        size = tensor.numel() * tensor.element_size()
        if self._held and self._bytes + size > SHARD_BYTES:
            self.flush()
        self._held[name] = tensor.contiguous()
        self._bytes += size

    def flush(self) -> None:
        """Write what is held."""
        if not self._held:
            return
        try:
            from safetensors.torch import save_file
        except ImportError:
            raise VersionError(
                "A model's folder needs the package safetensors: pip install 'distca[models]'."
            ) from None
        name = SINGLE if self._files == 1 else f"model-{self._number:05d}-of-{self._files:05d}.safetensors"
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file(self._held, self._folder / name, metadata={"format": "pt"})
        self.file_of |= dict.fromkeys(self._held, name)
        self._number, self._held, self._bytes = self._number + 1, {}, 0


def count_shards(exported: ExportedModel, names: Iterable[str]) -> int:
    """Files that a writer makes of tensors of these names, in this order."""
    shapes, value_bytes = expected_shapes(exported.model), VALUE_BYTES[exported.dtype]
    files = held = 0
    for name in names:
        size = math.prod(shapes[name]) * value_bytes
        if not files or held + size > SHARD_BYTES:
            files, held = files + 1, 0
        held += size
    return files


def finish(folder: Path, file_of: Mapping[str, str], exported: ExportedModel) -> None:
    """Write everything but tensors and put all in place, config.json last, without which a folder is none.

    Args:
        folder: with the files of tensors.
        file_of: by tensor, its file.
        exported: what the folder is to be.
    """
    partial, names = folder / PARTIAL, sorted(set(file_of.values()))
    if names != [SINGLE]:
        values = sum(math.prod(shape) for shape in expected_shapes(exported.model).values())
        index = {
            "metadata": {"total_size": values * VALUE_BYTES[exported.dtype]},
            "weight_map": dict(sorted(file_of.items())),
        }
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX)
    if exported.source is not None:
        names += copy_companions(exported.source, partial)
    (partial / CONFIG).write_text(json.dumps(exported.fields, indent=2) + "\n", encoding="utf-8")
    put_in_place(folder, [*names, CONFIG])


def put_in_place(folder: Path, names: Sequence[str]) -> None:
    """Move files that were written to where they belong, the last one last; OSError where that fails, with none of
    them there.

    Args:
        folder: for which :func:`begin` made room.
        names: of the files.
    """
    placed: list[Path] = []
    try:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            placed.append((folder / PARTIAL / name).replace(folder / name))
    except OSError:
        for file in placed:
            file.unlink(missing_ok=True)
        raise
    clear(folder)
