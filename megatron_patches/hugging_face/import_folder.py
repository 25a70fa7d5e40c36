"""Converts a Hugging Face folder to a Megatron checkpoint that has only weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from distca.models.description import ModelDescription
from distca.models.shape import ModelShape
from distca.models.tensors import TensorFiles
from megatron_patches.checkpoint.whole_weights import save_weights
from megatron_patches.hugging_face.weights import load_weights
from megatron_patches.layers.block import block_spec
from megatron_patches.model.gpt import build_gpt, build_hybrid_of, transformer_config
from megatron_patches.model.model_variant import model_options
from megatron_patches.ranks.groups import one_process


def import_folder(
    files: TensorFiles,
    described: ModelDescription,
    shape: ModelShape,
    dtype: torch.dtype,
    target: Path,
    advance: Callable[[int], object],
) -> None:
    """Writes a folder's weights as a checkpoint of Megatron-Core. All weights must fit into this process's memory.

    Args:
        files: the folder's tensors, whose ``check`` has passed.
        dtype: dtype of the checkpoint's weights.
        target: an existing empty folder.
        advance: as in :func:`load_weights`.
    """
    with one_process():
        config = transformer_config(shape, dtype, cpu_initialization=True)
        config.perform_initialization = False
        options = model_options(shape)
        if shape.hybrid.pattern:
            from megatron_patches.layers.hybrid_stack import hybrid_stack_spec

            gpt = build_hybrid_of(shape, described.vocabulary, config, hybrid_stack_spec(config, options=options))
        else:
            spec = block_spec(config, options=options, disaggregate=False)
            gpt = build_gpt(shape, described.vocabulary, config, spec)
        load_weights(gpt, described, files, advance)
        save_weights(gpt, target)
