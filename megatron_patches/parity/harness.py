"""Hold disaggregated training against unmodified megatron-core: same weights, same tokens, same loss and gradients.

The reference is stock megatron-core on one rank: its local spec untouched, all documents in one sequence under a dense
mask that hides other documents; only the rotary angles are set by position in the document. The candidate is the
training path itself: split layers, server pool, megatron's DDP, gradient finalisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from distca.attention import Kernel
from distca.data.batch import RankBatch, rank_batch
from distca.data.corpus import DocumentSet
from distca.data.sampler import MicroBatch
from distca.plan import Layout, lay_out
from distca.plan.cost.analytic import area_cost
from distca.plan.micro_batch import plan_micro_batch
from distca.runtime import AttentionPool, LayerRoutes, NanoRoutes
from distca.runtime.timeline import Timeline
from distca.testing.plans import random_plan
from distca.transport import choose_transport
from megatron_patches.batch_context import DisaggregatedMicroBatch
from megatron_patches.groups import initialize_model_parallel, server_pool_group
from megatron_patches.model import Attention, build_model, transformer_config
from megatron_patches.parity.weights import load_full_weights, share_of
from megatron_patches.training_step import DeviceBatch, run_micro_batches, wrap_for_data_parallel

Recompute = Literal["none", "mlp", "all"]


@dataclass(frozen=True, kw_only=True)
class ParityShape:
    """A small LLaMA with grouped queries."""

    layers: int = 2
    hidden: int = 32
    ffn: int = 48
    heads: int = 4
    kv_heads: int = 2
    resolved_head_dim: int = 8
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    init_std: float = 0.1
    vocabulary: int = 64
    tie_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One comparison.

    Attributes:
        micro_batches: document lengths of each micro-batch.
        tp: tensor-parallel size, with sequence parallelism; what is left of the world is the server pool.
        ping_pong: two nano-batches.
        backward: keep or resend.
        recompute: nothing, every layer's MLP, or everything but core attention.
        scheduler: "real": the planner's. "random": random cuts on random servers, to stress routes.
        seed: of weights, tokens and random plans.
        changed_document: (micro-batch, document) whose tokens are drawn anew.
        tie_embeddings: the output layer's weights are the embedding's.
        last_stage_layers: with pipeline stages, layers of the last one; None for as many as the others have.
        shape: the model's sizes.
        config: fields of megatron's configuration that differ from those of a LLaMA, with their values.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    tp: int = 1
    ping_pong: bool = True
    backward: Literal["keep", "resend"] = "keep"
    recompute: Recompute = "none"
    scheduler: Literal["real", "random"] = "real"
    seed: int = 1
    changed_document: tuple[int, int] | None = None
    tie_embeddings: bool = False
    last_stage_layers: int | None = None
    shape: ParityShape = field(default_factory=ParityShape)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gated(self) -> bool:
        """The MLPs have a gate."""
        return bool(self.config.get("gated_linear_unit", True))


@dataclass(frozen=True)
class Outcome:
    """What a model computed.

    Attributes:
        loss: mean loss over target tokens.
        gradients: full gradient of every parameter, float64 on the CPU.
        document_losses: per micro-batch, [documents] summed loss of each document.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    document_losses: list[torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """How far a candidate is from the reference: relative norms.

    Attributes:
        loss: of the loss.
        gradient: of the parameter that differs most.
        parameter: its name.
    """

    loss: float
    gradient: float
    parameter: str


def difference(candidate: Outcome, reference: Outcome) -> Difference:
    """Compare loss and every parameter's gradient."""
    errors = {
        name: float((candidate.gradients[name] - expected).norm() / expected.norm())
        for name, expected in reference.gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return Difference(abs(candidate.loss - reference.loss) / abs(reference.loss), errors[worst], worst)


class RandomDocuments(DocumentSet):
    """Seeded random tokens for the documents of a case; ids are numbered over all micro-batches."""

    def __init__(self, case: ParityCase) -> None:
        self.lengths = np.concatenate([np.asarray(lengths, np.int64) for lengths in case.micro_batches])
        first = np.cumsum([0] + [len(lengths) for lengths in case.micro_batches])
        changed = None
        if case.changed_document is not None:
            changed = int(first[case.changed_document[0]]) + case.changed_document[1]
        self.tokens_of = [
            np.random.default_rng((case.seed, document, document == changed)).integers(
                0, case.shape.vocabulary, int(length)
            )
            for document, length in enumerate(self.lengths)
        ]
        self.micro_batches = [
            MicroBatch(np.arange(first[n], first[n + 1]), np.asarray(lengths, np.int64), None)
            for n, lengths in enumerate(case.micro_batches)
        ]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        tokens: np.ndarray = self.tokens_of[document][start:stop]
        return tokens


def run_stock(case: ParityCase, dtype: torch.dtype, device: torch.device) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """The reference, computed by this rank alone; also returns the full weights. Every rank calls it together."""
    initialize_model_parallel(1, 1, case.seed)
    model = build(case, dtype, "stock").to(device)
    documents = RandomDocuments(case)
    total, tokens, per_document = 0.0, 0, []
    for micro_batch in documents.micro_batches:
        layouts = lay_out(micro_batch.lengths, 1)
        rows = rank_batch(documents, micro_batch, layouts, 0)
        owner = np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)
        batch = to_device_batch(rows, hidden_scores(micro_batch.lengths, rows.positions).to(device), device)
        model.rotary_pos_emb.set_positions(batch.positions)
        losses = model(batch.tokens, None, batch.micro_batch, labels=batch.labels).flatten()
        loss = (losses * batch.loss_mask).sum()
        loss.backward()
        total, tokens = total + loss.item(), tokens + int(batch.loss_mask.sum())
        per_document.append(_per_document(losses.detach() * batch.loss_mask, owner, len(micro_batch.lengths)))
    gradients = {name: p.grad.double().cpu() / tokens for name, p in model.named_parameters()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Outcome(total / tokens, gradients, per_document), weights


def run_disaggregated(
    case: ParityCase, dtype: torch.dtype, device: torch.device, kernel: Kernel, weights: dict[str, torch.Tensor]
) -> Outcome:
    """The candidate, over all ranks; every rank calls it and gets the same outcome (document losses are empty)."""
    initialize_model_parallel(case.tp, 1, case.seed)
    timeline = Timeline(device)
    pool = AttentionPool(choose_transport("auto", server_pool_group()), kernel, timeline, case.backward)
    gpt = build(case, dtype, "disaggregated", pool=pool).to(device)
    load_full_weights(gpt, weights, parallel_state.get_tensor_model_parallel_rank(), case.gated)
    model = wrap_for_data_parallel(gpt, distributed_optimizer=False)
    batches = [batch for batch, _ in _batches(case, pool, device)]
    total, tokens = run_micro_batches(model, batches)
    full = {name: value.shape for name, value in weights.items()}
    gradients = {name: gather_shares(name, p.main_grad, full[name], case.gated) for name, p in gpt.named_parameters()}
    return Outcome((total / tokens).item(), gradients, [])


def document_losses(
    case: ParityCase, dtype: torch.dtype, device: torch.device, kernel: Kernel, weights: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Per micro-batch, [documents] summed loss of each document, by the disaggregated model over all ranks."""
    initialize_model_parallel(case.tp, 1, case.seed)
    pool = AttentionPool(choose_transport("auto", server_pool_group()), kernel, Timeline(device), case.backward)
    gpt = build(case, dtype, "disaggregated", pool=pool).to(device)
    load_full_weights(gpt, weights, parallel_state.get_tensor_model_parallel_rank(), case.gated)
    results = []
    for (batch, owner), lengths in zip(_batches(case, pool, device), case.micro_batches, strict=True):
        gpt.rotary_pos_emb.set_positions(batch.positions)
        with torch.no_grad():
            losses = gpt(batch.tokens, None, batch.micro_batch, labels=batch.labels).flatten() * batch.loss_mask
        total = _per_document(losses, owner, len(lengths))
        dist.all_reduce(total, group=server_pool_group())
        results.append(total)
    return results


def build(case: ParityCase, dtype: torch.dtype, attention: Attention, **parts: Any) -> GPTModel:
    """The case's model on the CPU, with weights drawn the same way for every tensor-parallel size; ``parts`` go to
    build_model."""
    torch.manual_seed(case.seed)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    staged = parallel_state.get_pipeline_model_parallel_world_size() > 1
    config = transformer_config(
        case.shape,
        dtype,
        sequence_parallel=tp > 1,
        recompute_mlp=attention == "disaggregated" and case.recompute == "mlp",
        cpu_initialization=True,
        last_stage_layers=case.last_stage_layers if staged else None,
    )
    if case.config:
        config = replace(config, **case.config)
    shape = replace(case.shape, tie_embeddings=case.tie_embeddings)
    segments = case.recompute == "all"
    model = build_model(shape, shape.vocabulary, config, attention, recompute_segments=segments, **parts)
    if case.config:
        _draw_vectors(model)
    return model


def _draw_vectors(model: GPTModel) -> None:
    """Norms start at one and biases at zero, at which what uses them in a wrong place may still be right."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)


def hidden_scores(lengths: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """[1, 1, tokens, tokens] bool: true where a packed token must not see another."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return torch.from_numpy((owner[:, None] != owner[None]) | (positions[:, None] < positions[None]))[None, None]


@dataclass(frozen=True)
class PlannedMicroBatch:
    """A micro-batch's layouts and this rank's routes."""

    layouts: tuple[Layout, ...]
    routes: LayerRoutes
    rank: int
    chunks: int

    def by_layer(self, case: ParityCase) -> list[LayerRoutes]:
        """The routes of every layer of the case's model."""
        return [self.routes] * case.shape.layers

    def rows(self, documents: DocumentSet, micro_batch: MicroBatch) -> RankBatch:
        """This rank's rows of ``documents``."""
        return rank_batch(documents, micro_batch, self.layouts, self.rank, align=self.chunks, chunks=self.chunks)


def rows_of(
    case: ParityCase, documents: DocumentSet, micro_batch: MicroBatch, layouts: tuple[Layout, ...], rank: int
) -> RankBatch:
    """The rows of ``documents`` that live on data-parallel rank ``rank``."""
    return rank_batch(documents, micro_batch, layouts, rank, align=case.tp, chunks=case.tp)


def plans_of(
    case: ParityCase, micro_batch: MicroBatch, rank: int, ranks: int, number: int, device: torch.device
) -> PlannedMicroBatch:
    """Plan the case's micro-batch ``number`` for ``ranks`` servers."""
    shape = case.shape
    plan = plan_micro_batch(
        micro_batch.lengths,
        ranks,
        area_cost(shape.heads // case.tp, shape.kv_heads // case.tp, shape.resolved_head_dim),
        nano_batches=2 if case.ping_pong else 1,
        align=case.tp,
        resend=case.backward == "resend",
    )
    routes: list[NanoRoutes] = []
    previous = None
    for half, nano in enumerate(plan.nano_batches):
        forward, backward = nano.forward, nano.backward
        if case.scheduler == "random":
            seed = case.seed * 1000 + number * 10 + half
            forward = random_plan(nano.layout, seed)
            backward = random_plan(nano.layout, seed + 5) if case.backward == "resend" else forward
        routes.append(NanoRoutes.of(forward, backward, rank, device, previous))
        previous = nano.layout
    return PlannedMicroBatch(tuple(nano.layout for nano in plan.nano_batches), tuple(routes), rank, case.tp)


def gather_shares(name: str, share: torch.Tensor, full: torch.Size, gated: bool = True) -> torch.Tensor:
    """The full gradient from every tensor-parallel rank's share, float64 on the CPU."""
    if share.shape == full:
        return share.double().cpu()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    shares = [torch.empty_like(share) for _ in range(tp)]
    dist.all_gather(shares, share.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    whole = torch.empty(full, dtype=torch.float64)
    # Where each element of the full tensor went is found by sharding its element numbers.
    numbers = torch.arange(whole.numel()).view(full)
    for rank, part in enumerate(shares):
        whole.view(-1)[share_of(name, numbers, share.shape, rank, gated).flatten()] = part.double().cpu().flatten()
    return whole


def _batches(case: ParityCase, pool: AttentionPool, device: torch.device) -> list[tuple[DeviceBatch, np.ndarray]]:
    """This rank's micro-batches, and the document of each of their rows (padding rows: the first; their loss is 0)."""
    documents = RandomDocuments(case)
    batches = []
    for number, micro_batch in enumerate(documents.micro_batches):
        planned = plans_of(case, micro_batch, pool.transport.rank, pool.transport.ranks, number, device)
        rows = planned.rows(documents, micro_batch)
        owners = planned.rows(_Owners(documents), micro_batch).tokens
        attention = DisaggregatedMicroBatch(planned.by_layer(case), rows.nano_rows, case.tp)
        batches.append((to_device_batch(rows, attention, device), owners))
    return batches


class _Owners(DocumentSet):
    """Reads as if each token were its document's number in the micro-batch."""

    def __init__(self, documents: RandomDocuments) -> None:
        self.lengths = documents.lengths
        self._number = {
            int(document): number
            for micro_batch in documents.micro_batches
            for number, document in enumerate(micro_batch.documents)
        }

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return np.full(stop - start, self._number[document], np.int64)


def to_device_batch(
    rows: RankBatch, attention: torch.Tensor | DisaggregatedMicroBatch, device: torch.device
) -> DeviceBatch:
    """Bring a rank's rows to the device."""
    tokens, labels, mask, positions = (
        torch.from_numpy(x).to(device) for x in (rows.tokens, rows.labels, rows.loss_mask, rows.positions)
    )
    return DeviceBatch(tokens[None], labels[None], mask, positions, attention)


def _per_document(losses: torch.Tensor, owner: np.ndarray, documents: int) -> torch.Tensor:
    """Sum each document's token losses in float64, where the order of a few additions does not show."""
    total = torch.zeros(documents, dtype=torch.float64, device=losses.device)
    return total.index_add_(0, torch.from_numpy(owner).to(losses.device), losses.double())
