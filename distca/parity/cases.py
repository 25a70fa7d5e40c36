"""One comparison of disaggregated training with unmodified Megatron-Core: the model, its documents, and how it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from distca.models.shape import ModelShape
from megatron_patches.model.gpt import transformer_config
from megatron_patches.model.model_options import MEGATRONS, ModelOptions

Recompute = Literal["none", "mlp", "all"]


LENGTHS = ((13, 7, 1, 29, 3), (50, 2))
"""Tokens of the documents of two micro-batches, which most cases train on."""


@dataclass(frozen=True, kw_only=True)
class ParityShape(ModelShape):
    """A small LLaMA with grouped queries; a case's configuration may say otherwise.

    Attributes:
        init_std: standard deviation of the weights.
    """

    layers: int = 2
    hidden: int = 32
    ffn: int = 48
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 64
    rope_base: float = 10000.0
    init_std: float = 0.1


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One comparison.

    Attributes:
        micro_batches: document lengths of each micro-batch.
        tp: tensor-parallel size, with sequence parallelism.
        pp: pipeline stages, which resend; what is left of the world is data parallel.
        ep: expert-parallel size, within the ranks of a stage.
        deal: documents are dealt over micro-batches anew.
        ping_pong: two nano-batches.
        backward: keep or resend.
        recompute: nothing, every layer's MLP, or everything but core attention.
        offload: keep in host memory what backward needs.
        scheduler: "real": the planner's. "random": random cuts on random servers, to stress routes.
        ranks_per_node: consecutive servers that count as a node; 0 for those of one machine.
        servers: servers without a model, beside the ranks.
        speeds: of every server of the pool, as plans are to take them; none where all are alike.
        seed: of weights, tokens and random plans.
        changed_document: (micro-batch, document) whose tokens are drawn anew.
        tie_embeddings: the output layer's weights are the embedding's.
        shape: the model's sizes.
        config: fields of megatron's configuration that differ from those of a LLaMA, with their values.
        options: what the model does that megatron's configuration has no field for.
        rotary_percent: how much of each head is rotated.
        pattern: the pattern of a HybridModel's layers; empty for a GPTModel.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    tp: int = 1
    pp: int = 1
    ep: int = 1
    deal: bool = True
    ping_pong: bool = True
    backward: Literal["keep", "resend"] = "keep"
    recompute: Recompute = "none"
    offload: bool = False
    scheduler: Literal["real", "random"] = "real"
    ranks_per_node: int = 0
    servers: int = 0
    speeds: tuple[float, ...] = ()
    seed: int = 1
    changed_document: tuple[int, int] | None = None
    tie_embeddings: bool = False
    shape: ParityShape = field(default_factory=ParityShape)
    config: Mapping[str, Any] = field(default_factory=dict)
    options: ModelOptions = MEGATRONS
    rotary_percent: float = 1.0
    pattern: str = ""

    @property
    def model(self) -> ParityShape:
        """The shape, with what the case says of its output layer."""
        return replace(self.shape, tie_embeddings=self.tie_embeddings)

    @property
    def beyond_megatron(self) -> bool:
        """Unmodified Megatron-Core cannot compute it, so that the reference is written out in :mod:`plain_model`."""
        return self.options != MEGATRONS or bool(self.config.get("layernorm_zero_centered_gamma"))

    @property
    def apart(self) -> bool:
        """The reference computes each document by itself."""
        kinds = self.config.get("moe_router_load_balancing_type", ())
        own_sequences = {"window_size", "experimental_attention_variant", "multi_latent_attention"} & self.config.keys()
        return bool(own_sequences) or "seq_aux_loss" in kinds or bool(self.pattern)


def case_documents(case: ParityCase) -> list[list[np.ndarray]]:
    """Seeded random tokens of the case's documents, by micro-batch."""
    documents: list[list[np.ndarray]] = []
    number = 0
    for m, lengths in enumerate(case.micro_batches):
        documents.append([])
        for d, length in enumerate(lengths):
            seed = (case.seed, number, (m, d) == case.changed_document)
            documents[-1].append(np.random.default_rng(seed).integers(0, case.shape.vocabulary, int(length)))
            number += 1
    return documents


def config_of(case: ParityCase, dtype: torch.dtype) -> TransformerConfig:
    """The configuration of the case's model, whose weights are drawn the same way for every tensor-parallel size."""
    torch.manual_seed(case.seed)
    config = transformer_config(
        case.shape,
        dtype,
        sequence_parallel=case.tp > 1,
        recompute_mlp=case.recompute == "mlp",
        cpu_initialization=True,
        init_std=case.shape.init_std,
    )
    if config.recompute_modules and case.config.get("num_moe_experts"):
        config.recompute_modules = ["mlp", "moe"]
    experts = {"expert_model_parallel_size": case.ep} if case.ep > 1 else {}
    if case.config.get("multi_latent_attention"):
        given = {each.name: getattr(config, each.name) for each in fields(config) if each.init}
        return MLATransformerConfig(**{**given, **case.config, **experts})
    return replace(config, **case.config, **experts) if case.config else config
