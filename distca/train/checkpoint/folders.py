"""The Hugging Face folders that a run names: looked at before it starts, and the weights that it begins with."""

from __future__ import annotations

import logging
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distca.errors import VersionError
from distca.models.description import describe_folder
from distca.models.folder import check_empty, is_written
from distca.models.tensors import TensorFiles
from distca.train.checkpoint.integrity import COMPLETE
from distca.train.config.initial import context_warning, description_of
from distca.train.config.schema import RunConfig
from distca.train.run.folder_choice import resume_run_folder
from distca.train.run.run_folder import Checkpoint
from distca.words import format_bytes

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

logger = logging.getLogger(__name__)


def check_folders(config: RunConfig) -> None:
    """Refuse, before anything is built, a folder that the run cannot begin with, or cannot write.

    Raises:
        ConfigError: there is no run that checkpoint.resume asks for, or the folder to write is not empty.
        ModelError: tensors are missing, have other shapes, or are cut short.
        VersionError: the package safetensors is missing.
    """
    settings = config.checkpoint
    if (settings.init_from or settings.export) and find_spec("safetensors") is None:
        raise VersionError(
            "checkpoint.init_from and checkpoint.export need the package safetensors: pip install 'distca[models]'."
        )
    if os.environ.get("RANK", "0") != "0":
        return  # one rank is enough to look at every file
    resumed = resume_run_folder(config) if settings.resume else None
    if settings.init_from and resumed is None:
        folder = Path(settings.init_from)
        described = describe_folder(folder)
        TensorFiles(folder, "numpy").check(described)
        for warning in (*described.warnings, *filter(None, [context_warning(config)])):
            logger.warning("%s", warning)
    if settings.export:
        description_of(config, 1)
        if resumed is None or resumed[1].step < config.train.steps or lacks_export(config, resumed[1]):
            check_empty(Path(settings.export), "checkpoint.export")


def lacks_export(config: RunConfig, checkpoint: Checkpoint) -> bool:
    """Whether checkpoint.export is still to be written from the last checkpoint of a run: nobody did since it was
    saved, such as an earlier start of the same command."""
    export = config.checkpoint.export
    return bool(export) and not is_written(Path(str(export)), after=checkpoint.path / COMPLETE)


def load_initial_weights(gpt: GPTModel, folder: Path) -> None:
    """Copy this rank's shares of the folder's weights into a built model; nothing else is taken from it.

    Args:
        gpt: this rank's part, on its device, not wrapped yet.
        folder: from checkpoint.init_from, checked.

    Raises:
        ModelError: a file cannot be read any more.
    """
    from megatron_patches.hugging_face.weights import load_weights

    described, files, began = describe_folder(folder), TensorFiles(folder), time.perf_counter()
    own = str(gpt.config.params_dtype).removeprefix("torch.")
    if (stored := files.dtype(described.weights.embedding)) != own and own != "float32":
        logger.warning("The weights of %s are %s and are rounded to %s.", folder, stored, own)
    read: list[int] = []
    load_weights(gpt, described, files, read.append)
    seconds = time.perf_counter() - began
    logger.info("Weights from %s: %s on this rank in %.1f s", folder, format_bytes(sum(read)), seconds)
