"""Hugging Face folders of a run: the one that it begins with, and the one that it leaves behind."""

from __future__ import annotations

import logging
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.errors import VersionError
from distca.models.description import describe_folder, read_config
from distca.models.folder import ExportedModel, check_empty, config_fields
from distca.models.layout import EMBEDDING
from distca.models.tensors import TensorFiles
from distca.train.config.initial import description_of
from distca.train.config.schema import RunConfig
from distca.train.metrics.progress import format_bytes

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from distca.train.run.builder import Trainer

logger = logging.getLogger(__name__)


def check_folders(config: RunConfig) -> None:
    """Refuse, before anything is built, a folder that the run cannot begin with, or cannot write.

    Raises:
        ModelError: tensors are missing, have other shapes, or are cut short; or the folder to write is not empty.
        VersionError: the package safetensors is missing.
    """
    settings = config.checkpoint
    if (settings.init_from or settings.export) and find_spec("safetensors") is None:
        raise VersionError(
            "checkpoint.init_from and checkpoint.export need the package safetensors: pip install 'distca[models]'."
        )
    if os.environ.get("RANK", "0") != "0":
        return  # one rank is enough to look at every file
    if settings.init_from and not settings.resume:
        folder = Path(settings.init_from)
        TensorFiles(folder, "numpy").check(describe_folder(folder))
    if settings.export:
        description_of(config, 1)
        check_empty(Path(settings.export), "checkpoint.export")


def load_initial_weights(gpt: GPTModel, folder: Path) -> None:
    """Copy this rank's shares of the folder's weights into a built model; nothing else is taken from it.

    Args:
        gpt: this rank's part, on its device, not wrapped yet.
        folder: from checkpoint.init_from, checked.

    Raises:
        ModelError: a file cannot be read any more.
    """
    from megatron_patches.weights import load_weights

    described, files, began = describe_folder(folder), TensorFiles(folder), time.perf_counter()
    own = str(gpt.config.params_dtype).removeprefix("torch.")
    if (stored := files.dtype(EMBEDDING)) != own and own != "float32":
        logger.warning("The weights of %s are %s and are rounded to %s.", folder, stored, own)
    read: list[int] = []
    load_weights(gpt, described, files, read.append)
    seconds = time.perf_counter() - began
    logger.info("Weights from %s: %s on this rank in %.1f s", folder, format_bytes(sum(read)), seconds)


def exported(config: RunConfig, vocabulary: int) -> ExportedModel:
    """What is written of a run beside its weights.

    Args:
        config: the run.
        vocabulary: token ids of the model.

    Raises:
        ModelError: transformers has no such model.
    """
    source = Path(config.checkpoint.init_from) if config.checkpoint.init_from else None
    if source is not None and not source.is_dir():
        logger.warning("%s is gone, so no tokenizer comes along.", source)
        source = None
    dtype = "bfloat16" if config.train.precision == "bf16" else "float32"
    first: dict[str, Any] = {}
    if source is not None:
        first, dtype = read_config(source), TensorFiles(source, "numpy").dtype(EMBEDDING)
    described = description_of(config, vocabulary)
    return ExportedModel(described, config_fields(described, dtype, first), dtype, source)


def export(trainer: Trainer, folder: Path) -> None:
    """Write the weights as a Hugging Face folder, in the type of the one that the run began with, else in their own;
    every rank calls it.

    Raises:
        CheckpointError: on every rank, if one cannot write.
    """
    from megatron_patches.checkpoint.optimizer_state import main_values
    from megatron_patches.export import export_weights

    began = time.perf_counter()
    logger.info("Writing %s", folder)
    values = main_values(trainer.optimizer.optimizer)
    export_weights(trainer.model, exported(trainer.config, trainer.vocabulary), folder, values)
    if trainer.world.rank == 0:
        size = sum(file.stat().st_size for file in folder.iterdir())
        logger.info("Wrote %s: %s in %.1f s", folder, format_bytes(size), time.perf_counter() - began)
