"""The tensors of a folder's safetensors files, of which only what is asked for is read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.errors import ModelError, VersionError, system_words
from distca.json_file import inside, open_regular, read_object
from distca.models.description import ModelDescription
from distca.models.layout import OUTPUT, expected_shapes
from distca.models.quantised import (
    BLOCKS,
    FACTORS,
    PARTS,
    SCALES,
    fp8_values,
    mxfp4_values,
    part_shapes,
)
from distca.models.stored import INDEX, SINGLE, has_single, plain_name, same_bytes, tensor_and_piece
from distca.words import count

if TYPE_CHECKING:
    import torch

_COMPUTED = ".rotary_emb.inv_freq"
"""Frequencies that older versions of transformers saved, though config.json says all of them."""
_NAMED = 3
_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "C64": 8,
} | dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1)
"""Bytes of a value by the type of its tensor."""
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def _named_as(model: ModelDescription, plain: str, stored: str) -> bool:
    """Whether a folder's model has a tensor under its name in the files: as a part of several, or as text alone."""
    if plain == OUTPUT:
        return True
    old = model.weights.old_body
    return plain != stored if model.composite else plain == stored or bool(old and stored.startswith(f"{old}."))


class TensorFiles:
    """A folder's tensors, by name. Files are mapped into memory; what is not read takes none.

    Attributes:
        folder: where they are.
        stored: by the name that a model of text alone would have, the name in the files.
    """

    def __init__(self, folder: Path, framework: str = "pt") -> None:
        """Look up where tensors are.

        Args:
            folder: with one safetensors file, or several and their index.
            framework: of what is read; with "numpy" torch is not imported.

        Raises:
            ModelError: there are none, or the index cannot be read.
            VersionError: the package safetensors is missing.
        """
        self.folder, self._framework = folder, framework
        self._open: dict[str, Any] = {}
        self._file_of = self._find()
        self.stored = self._plain_names()
        packed = {name.removesuffix(BLOCKS) for name in self.stored if name.endswith(BLOCKS)}
        scaled = {name.removesuffix(FACTORS) for name in self.stored if name.endswith(FACTORS)}
        for name in sorted(packed & self.stored.keys()):
            raise ModelError(f"{self.folder} has {name} and {name}{BLOCKS}, which are the same tensor of the model.")
        self._quantised = dict.fromkeys(packed, "mxfp4") | dict.fromkeys(scaled, "fp8")

    def check(self, model: ModelDescription) -> None:
        """Refuse tensors that are not those of a model.

        Raises:
            ModelError: a tensor is missing or too many, has another shape or a type that is not served, or a file is
                cut short.
        """
        for name, shape in expected_shapes(model).items():
            kind = self._quantised.get(name)
            if kind is not None and kind != model.quantised:
                raise ModelError(f"{self.folder} has {name} in {kind}, but config.json does not say so.")
            self._check(name, shape)
        for name in self.of_other_parts(model):
            self.size(name)  # which an export needs, behind the training
            if name in self._quantised:
                self._check(name, tuple(self._slice(name).get_shape()))
        self._refuse_others(model)
        if model.tie_embeddings and OUTPUT in self.stored:
            self._check_tied(model)

    def _check_tied(self, model: ModelDescription) -> None:
        """Refuse an output layer that was trained, though config.json says that it is the embedding."""
        names = [self.stored[name] for name in (model.weights.embedding, OUTPUT)]
        files = [self.folder / self._file_of[name] for name in names]
        if not same_bytes(files[0], names[0], files[1], names[1]):
            raise ModelError(
                f"{self.folder} has {names[1]}, which is not {names[0]}, though by config.json tie_word_embeddings is "
                "true; set it to false there to train both, or remove that tensor."
            )

    def of_other_parts(self, model: ModelDescription) -> tuple[str, ...]:
        """Names, in the files, of tensors that belong to other parts of the model, such as one for images."""
        scales = {name + end for name in self._quantised for end in (BLOCKS, SCALES, FACTORS)}
        return tuple(sorted(name for name in {*self._file_of} - scales if name.startswith(model.other_parts)))

    def size(self, name: str) -> int:
        """Bytes of a tensor as it is read, by its name in the files.

        Raises:
            ModelError: it is missing, or of a type whose values have no whole bytes.
        """
        part = self._slice(name)
        kind = "BF16" if name in self._quantised else part.get_dtype()
        if kind not in _BYTES:
            raise ModelError(f"{self.folder} has {name} of type {kind}, which cannot be carried along; remove it.")
        return math.prod(part.get_shape()) * _BYTES[kind]

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing, or of another shape or type, or whose scales are.

        Args:
            name: of the tensor.
            shape: that it must have as it is read.
        """
        kind = self._quantised.get(name)
        parts = part_shapes(kind, shape) if kind else {"": shape}
        if parts is None:
            raise ModelError(
                f"{self.folder} has {name} in {kind}, but by config.json it is of shape {list(shape)}, and no tensor "
                "of that shape is read so; use the folder that it was made from."
            )
        for end, needed in parts.items():
            if (found := tuple(self._slice(name + end).get_shape())) != needed:
                raise ModelError(
                    f"{self.folder} has {name + end} of shape {list(found)}, but by config.json it must be "
                    f"{list(needed)}."
                )
        self.dtype(name)

    def _refuse_others(self, model: ModelDescription) -> None:
        """Refuse tensors that the model does not have, without which another one would be trained."""
        known = {*expected_shapes(model), OUTPUT}  # which a folder may hold though it is the embedding
        known |= {name + end for name in known & self._quantised.keys() for end in (BLOCKS, SCALES, FACTORS)}
        theirs = {name for name in self._file_of if name.startswith(model.other_parts)}
        others = [
            stored
            for plain, stored in self.stored.items()
            if stored not in theirs
            and not stored.endswith(_COMPUTED)
            and (plain not in known or not _named_as(model, plain, stored))
        ]
        if others:
            left = len(others) - _NAMED
            more = f" and {count(left, 'other')}" if left > 0 else ""
            raise ModelError(
                f"{self.folder} has {', '.join(sorted(others)[:_NAMED])}{more}, which a model of its config.json does "
                "not have."
            )

    def dtype(self, name: str) -> str:
        """Type of a tensor as it is read, as torch calls it.

        Raises:
            ModelError: it is missing, or of a type that is not trained with.
        """
        kind = self._quantised.get(name)
        for end, served in PARTS.get(kind or "", {"": tuple(DTYPES)}).items():
            stored = self._slice(name + end).get_dtype()
            if stored not in served:
                raise ModelError(
                    f"{self.folder} has {name + end} of type {stored}, but quantised weights cannot be trained; use "
                    "the folder they were made from."
                    if kind is None
                    else f"{self.folder} has {name + end} of type {stored}, but of {kind} it must be {served[0]}."
                )
        return "bfloat16" if kind else DTYPES[stored]

    def read(self, name: str, *ranges: slice) -> torch.Tensor:
        """A part of a tensor, as it is in the file; in bfloat16 where it is quantised there.

        Args:
            name: of the tensor or of a piece.
            ranges: by dimension; those that are left out are whole.

        Raises:
            ModelError: it is missing, or a file is cut short.
        """
        name, number = tensor_and_piece(name)
        kind = self._quantised.get(name)
        if kind == "mxfp4":
            packed = (self._slice(name + end)[number] for end in (BLOCKS, SCALES))
            return mxfp4_values(*packed)[ranges]
        if kind == "fp8":
            return fp8_values(self._slice(name), self._slice(name + FACTORS), number, ranges)
        tensor: torch.Tensor = self._slice(name)[ranges or slice(None) if number is None else (number, *ranges)]
        return tensor

    def _slice(self, name: str) -> Any:
        name = self.stored.get(name, name)
        if name not in self._file_of:
            tied = " If its output layer is the embedding, set tie_word_embeddings to true there."
            hint = tied if name.endswith("lm_head.weight") else ""
            raise ModelError(f"{self.folder} has no tensor {name}, which a model of its config.json has.{hint}")
        file = self._file(self._file_of[name])
        try:
            return file.get_slice(name)
        except Exception:  # the package raises one class of its own, which differs between versions
            raise ModelError(
                f"{self.folder / self._file_of[name]} has no tensor {name}, though {INDEX} says so."
            ) from None

    def _plain_names(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for stored in self._file_of:
            if (other := found.setdefault(plain_name(stored), stored)) != stored:
                raise ModelError(f"{self.folder} has {other} and {stored}, which are the same tensor of the model.")
        return found

    def _find(self) -> Mapping[str, str]:
        index = self.folder / INDEX
        if os.path.lexists(index) and not has_single(self.folder):
            try:
                names: dict[str, str] = read_object(index)["weight_map"]
                for file in set(names.values()):
                    inside(self.folder, file)
            except OSError as error:
                raise ModelError(f"{index} cannot be read ({system_words(error)}).") from None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                said = str(error) if isinstance(error, ValueError) else "it has no object weight_map"
                raise ModelError(
                    f"{index} cannot be read ({said}); it must say in weight_map which file has a tensor."
                ) from None
            return names
        if os.path.lexists(self.folder / SINGLE):
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        pickled = " (its pytorch_model.bin is never read: it may run code)" if self._has_pickle() else ""
        raise ModelError(f"{self.folder} has neither {SINGLE} nor {INDEX}{pickled}.")

    def _has_pickle(self) -> bool:
        return any(self.folder.glob("pytorch_model*.bin"))

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                from safetensors import SafetensorError, safe_open
            except ImportError:
                raise VersionError(
                    "A model's folder needs the package safetensors: pip install 'distca[models]'."
                ) from None
            path = self.folder / name
            try:
                open_regular(path).close()
                self._open[name] = safe_open(path, framework=self._framework)
            except OSError as error:
                raise ModelError(f"{path} cannot be read ({system_words(error)}).") from None
            except SafetensorError as error:
                raise ModelError(f"{path} is no whole safetensors file, perhaps cut short ({error}).") from None
        return self._open[name]
