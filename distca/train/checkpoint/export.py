"""The Hugging Face folder that a run leaves behind."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distca.models.description import read_config
from distca.models.exported_config import config_fields
from distca.models.folder import ExportedModel
from distca.train.config.initial import description_of
from distca.train.config.schema import RunConfig
from distca.words import format_bytes

if TYPE_CHECKING:
    from distca.train.run.builder import Trainer

logger = logging.getLogger(__name__)

_COMPARED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""Files of which a difference changes ids, or what a chat template makes of a conversation."""


def exported(config: RunConfig, vocabulary: int) -> ExportedModel:
    """Returns all that is written of a run beside its weights.

    Args:
        config: the run.
        vocabulary: token ids of the model.

    Raises:
        ModelError: transformers has no such model.
    """
    source = Path(config.checkpoint.init_from) if config.checkpoint.init_from else None
    if source is not None and not source.is_dir():
        logger.warning(
            "%s is gone, so no tokenizer comes along, and type, longest context and special tokens of config.json are "
            "those of this run.",
            source,
        )
        source = None
    described = description_of(config, vocabulary)
    if source is not None:
        if said := tokenizer_warning(config, source):
            logger.warning("%s", said)
        return ExportedModel.after(described, read_config(source), source)
    dtype = "bfloat16" if config.train.precision == "bf16" else "float32"
    return ExportedModel(described, config_fields(described, dtype, {}), dtype)


def tokenizer_warning(config: RunConfig, source: Path) -> str | None:
    """A sentence where the run's tokenizer or its chat template is not that of ``source``, which the export gets."""
    named = Path(config.data.tokenizer)
    folder = named if named.is_dir() else named.parent
    alike = all(_content(folder / name) == _content(source / name) for name in _COMPARED)
    if alike or config.data.tokenizer == "bytes":
        return None
    return (
        f"The exported folder has the tokenizer, chat template and generation settings of {source}, but the run's "
        f"data.tokenizer is {named}, whose files differ. To use the model as it was trained, copy the tokenizer and "
        f"chat template from {folder} into the exported folder, and set eos_token_id in its generation_config.json."
    )


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def export(trainer: Trainer, folder: Path) -> None:
    """Write the weights as a Hugging Face folder, in the type of the one that the run began with, else in their own;
    every rank calls it.

    Raises:
        CheckpointError: on every rank, if one cannot write.
    """
    from megatron_patches.checkpoint.optimizer_state import main_values
    from megatron_patches.hugging_face.export import export_weights

    began = time.perf_counter()
    logger.info("Writing %s", folder)
    values = main_values(trainer.optimizer.optimizer)
    export_weights(trainer.model, exported(trainer.config, trainer.vocabulary), folder, values)
    if trainer.world.rank == 0:
        size = sum(file.stat().st_size for file in folder.iterdir())
        logger.info("Wrote %s: %s in %.1f s", folder, format_bytes(size), time.perf_counter() - began)
