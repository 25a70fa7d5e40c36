"""The logits of a Hugging Face folder as DistCA computes them, to be held against those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from distca.models.description import describe_folder
from distca.models.tensors import TensorFiles
from megatron_patches.api import CAD
from megatron_patches.hugging_face.weights import load_weights
from megatron_patches.model.gpt import build_model, transformer_config
from megatron_patches.model.model_variant import cad_keywords
from megatron_patches.ranks.groups import initialize_model_parallel
from megatron_patches.steps.step_documents import StepDocuments


def folder_logits(folder: Path, documents: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits of a folder's model for each document alone.

    One rank of its own calls it: inside :func:`megatron_patches.ranks.groups.one_process`, or of
    ``run_ranks``.

    Args:
        folder: with config.json and safetensors.
        documents: token ids of each, of one token at least.

    Returns:
        By document, [length, vocabulary] float32.

    Raises:
        ModelError: the folder is not served.
    """
    described, files = describe_folder(folder), TensorFiles(folder)
    files.check(described)
    initialize_model_parallel(1, 1, 1)
    config = transformer_config(described, torch.float32, cpu_initialization=True)
    config.perform_initialization = False
    cad = CAD(
        config,
        tokens_per_rank=max(map(len, documents)),
        disaggregate=False,
        kernel="reference",
        **cad_keywords(described),
    )
    model = cad.attach(build_model(described, described.vocabulary, cad))
    load_weights(model, described, files)
    ddp = cad.data_parallel(model, distributed_optimizer=False)
    found = []
    for document in documents:
        step = cad.plan_step(StepDocuments([[list(document)]]))
        (rows,) = cad.forward_backward(step, _logits_step, ddp, forward_only=True)
        found.append(rows[: len(document), : described.vocabulary])
    return found


def _logits_step(batches, model):  # type: ignore[no-untyped-def]
    batch = next(batches)
    output = model(batch.tokens, batch.positions, batch.attention)
    return output, lambda logits: (logits.sum() * 0, torch.tensor(1), logits[0])
