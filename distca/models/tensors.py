"""The tensors of a folder's safetensors files, of which only what is asked for is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.errors import ModelError, VersionError, system_words
from distca.json_file import inside, open_regular, read_object
from distca.models.description import ModelDescription
from distca.models.layout import OUTPUT, expected_shapes
from distca.words import count

if TYPE_CHECKING:
    import torch

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_COMPUTED = ".rotary_emb.inv_freq"
"""Frequencies that older versions of transformers saved, though config.json says all of them."""
_NAMED = 3
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class TensorFiles:
    """A folder's tensors, by name. Files are mapped into memory; what is not read takes none.

    Attributes:
        folder: where they are.
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

    def check(self, model: ModelDescription) -> None:
        """Refuse tensors that are not those of a model.

        Raises:
            ModelError: a tensor is missing or too many, has another shape or a type of quantised weights, or a file is
                cut short.
        """
        for name, shape in expected_shapes(model).items():
            found = tuple(self._slice(name).get_shape())
            if found != shape:
                raise ModelError(
                    f"{self.folder} has {name} of shape {list(found)}, but by config.json it must be {list(shape)}."
                )
            self.dtype(name)
        self._refuse_others(model)

    def _refuse_others(self, model: ModelDescription) -> None:
        """Refuse tensors that the model does not have, without which another one would be trained."""
        known = {*expected_shapes(model), OUTPUT}  # which a folder may hold though it is the embedding
        others = [name for name in self._file_of if name not in known and not name.endswith(_COMPUTED)]
        if others:
            left = len(others) - _NAMED
            more = f" and {count(left, 'other')}" if left > 0 else ""
            raise ModelError(
                f"{self.folder} has {', '.join(sorted(others)[:_NAMED])}{more}, which a model of its config.json does "
                "not have."
            )

    def dtype(self, name: str) -> str:
        """Type of a tensor, as torch calls it.

        Raises:
            ModelError: it is missing, or of a type that is not trained with.
        """
        kind = self._slice(name).get_dtype()
        if kind not in DTYPES:
            raise ModelError(
                f"{self.folder} has {name} of type {kind}, but quantised weights cannot be trained; use the folder "
                "they were made from."
            )
        return DTYPES[kind]

    def read(self, name: str, *ranges: slice) -> torch.Tensor:
        """A part of a tensor, as it is in the file.

        Args:
            name: of the tensor.
            ranges: by dimension; those that are left out are whole.

        Raises:
            ModelError: it is missing, or a file is cut short.
        """
        tensor: torch.Tensor = self._slice(name)[ranges or slice(None)]
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ModelError(f"{self.folder} has no tensor {name}, which a model of its config.json has.")
        file = self._file(self._file_of[name])
        try:
            return file.get_slice(name)
        except Exception:  # the package raises one class of its own, which differs between versions
            raise ModelError(
                f"{self.folder / self._file_of[name]} has no tensor {name}, though {INDEX} says so."
            ) from None

    def _find(self) -> Mapping[str, str]:
        index = self.folder / INDEX
        if os.path.lexists(index):
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
