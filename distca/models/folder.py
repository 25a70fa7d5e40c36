"""Writing a Hugging Face folder: tensors in several files, config.json, and what came along with the first one."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any

from distca.errors import ConfigError, VersionError, system_words
from distca.models.description import CONFIG, ModelDescription
from distca.models.exported_config import config_fields
from distca.models.layout import expected_shapes
from distca.models.stored import INDEX, SINGLE, tensor_and_piece
from distca.models.tensors import TensorFiles

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 << 30
"""Bytes of one file at most, unless one tensor alone has more; so much is in host memory at a time."""

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
    "tekken.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""Tokenizer, chat templates, generation settings, and settings by which a model with several parts reads images; code
that may lie beside them stays behind."""


_WEIGHTS = re.compile(rf"model(-\d+-of-\d+)?\.safetensors|{re.escape(INDEX)}")
"""The names of files of tensors and of their index."""
PARTIAL = ".partial"
"""The suffix of the folder that holds the files until all of them are written."""


def check_empty(folder: Path, setting: str) -> None:
    """Refuse a folder that holds something, or that cannot be made or written; one that is missing stays so. What a
    killed writer left is nothing: :func:`begin` deletes it, and what was in place is written again.

    Raises:
        ConfigError: naming ``setting``.
    """
    # Other machines of a run may look at the same moment, so what is made for a trial has a name of its own.
    nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    try:
        full = nearest == folder and not (folder / PARTIAL).is_dir() and any(folder.iterdir())
        if nearest != folder:
            with TemporaryDirectory(dir=nearest) as trial:
                Path(trial, folder.relative_to(nearest)).mkdir(parents=True)
            return
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


def copy_companions(source: Path, folder: Path) -> list[str]:
    """Copy the files of COMPANIONS; returns the names that were there."""
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
        types: of those that have another one, by name.
        source: the folder that training began with, for tokenizer, chat template, generation settings and tensors of
            other parts; None where there was none.
        stored: its tensors' names in the files, by those that a model of text alone would have; by default the same.
        others: bytes of each tensor of other parts, by its name in the files of ``source``.
    """

    model: ModelDescription
    fields: Mapping[str, Any]
    dtype: str
    source: Path | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)

    def dtype_of(self, name: str) -> str:
        """The type of a tensor, or of a piece of one."""
        return self.types.get(tensor_and_piece(name)[0], self.dtype)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor of the model, by name."""
        shapes = expected_shapes(self.model)
        return {name: math.prod(shape) * VALUE_BYTES[self.dtype_of(name)] for name, shape in shapes.items()}

    @classmethod
    def after(cls, model: ModelDescription, first: Mapping[str, Any], source: Path) -> ExportedModel:
        """The folder of a model that began with another one.

        Args:
            model: what is trained.
            first: the config.json that training began with.
            source: its folder.

        Raises:
            ModelError: a file of it cannot be read.
        """
        files = TensorFiles(source, "numpy")
        dtype = files.dtype(model.weights.embedding)
        others = {name: files.size(name) for name in files.of_other_parts(model)}
        types = {name: kind for name in expected_shapes(model) if (kind := files.dtype(name)) != dtype}
        return cls(model, config_fields(model, dtype, first), dtype, source, files.stored, others, types)


class ShardWriter:
    """Writes tensors into numbered files, each as soon as it is full.

    Args:
        folder: for which :func:`begin` made room.
        first: number of the first file.
        files: how many there are in all, by all writers.
        stored: the names of tensors in the files, where they differ.
        pieces: of a tensor that comes in pieces, one for each expert.
    """

    def __init__(
        self, folder: Path, first: int, files: int, stored: Mapping[str, str] | None = None, pieces: int = 0
    ) -> None:
        self._folder, self._number, self._files = folder / PARTIAL, first, files
        self._stored, self._pieces = stored or {}, pieces
        self._begun: dict[str, tuple[torch.Tensor, set[int]]] = {}
        self._held: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self.file_of: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, of the type in which it is written, or a piece of one, which is held until all are there.

        Raises:
            OSError, SafetensorError: a file that is full cannot be written.
        """
        name, number = tensor_and_piece(name)
        if number is not None:
            whole, there = self._begun.setdefault(name, (tensor.new_empty(self._pieces, *tensor.shape), set()))
            whole[number] = tensor
            there.add(number)
            if len(there) < self._pieces:
                return
            tensor = self._begun.pop(name)[0]
        name, size = self._stored.get(name, name), tensor.numel() * tensor.element_size()
        if self._held and self._bytes + size > SHARD_BYTES:
            self.flush()
        self._held[name] = tensor.contiguous()
        self._bytes += size

    def add_others(self, exported: ExportedModel) -> None:
        """Take the tensors of other parts as they are in the first folder.

        Raises:
            ModelError: one cannot be read any more.
            OSError, SafetensorError: as in :meth:`add`.
        """
        if exported.others and exported.source is not None:
            files = TensorFiles(exported.source)
            for name in exported.others:
                self.add(name, files.read(name))

    def flush(self) -> None:
        """Write what is held; errors are as in :meth:`add`."""
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


def count_shards(exported: ExportedModel, names: Iterable[str], others: bool = False) -> int:
    """Files that a writer makes of tensors of these names, in this order, and then of those of other parts. A tensor is
    written with its last piece."""
    of = exported.sizes
    last = {tensor_and_piece(name)[0]: place for place, name in enumerate(names)}
    sizes = [of[name] for name in sorted(last, key=last.__getitem__)]
    files = held = 0
    for size in sizes + (list(exported.others.values()) if others else []):
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
    whole = {exported.stored.get(name, name) for name in exported.sizes} | exported.others.keys()
    assert file_of.keys() == whole, f"not written as the model has them: {sorted(file_of.keys() ^ whole)}"
    partial, names = folder / PARTIAL, sorted(set(file_of.values()))
    if names != [SINGLE]:
        index = {
            "metadata": {"total_size": sum(exported.sizes.values()) + sum(exported.others.values())},
            "weight_map": dict(sorted(file_of.items())),
        }
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX)
    if exported.source is not None:
        names += copy_companions(exported.source, partial)
    (partial / CONFIG).write_text(json.dumps(exported.fields, indent=2) + "\n", encoding="utf-8")
    # A writer that was killed here may have had its weights in other files, which would be read in place of these.
    for file in folder.glob("model*"):
        if _WEIGHTS.fullmatch(file.name) and file.name not in names:
            file.unlink()
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
