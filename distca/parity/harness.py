"""Hold disaggregated training against unmodified Megatron-Core: same weights, same tokens, same loss and gradients.

The reference is unmodified Megatron-Core on one rank: its local spec untouched, all documents in one sequence under a
dense mask that hides other documents; only the rotary angles are set by position in the document. Where layers have
windows, which Megatron takes in place of a given mask, every document is a sequence of its own. The candidate is the
public API, as a training script uses it: CAD, its block spec and schedule, Megatron's DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from distca.data.batch import rank_batch
from distca.models.rope import RopeScaling
from distca.models.variant import Variant
from distca.parity.plain_model import PlainModel
from distca.plan import Direction, Layout, Plan, lay_out
from distca.plan.kinds import windows_of
from distca.testing.plans import random_plan
from distca.testing.reference_attention import relative_error
from megatron_patches.api import CAD
from megatron_patches.layers.block import block_spec
from megatron_patches.model.gpt import build_gpt, transformer_config
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.model.whole_parameters import gather_gradients, load_full_weights, names_in_whole
from megatron_patches.patches.position_rotary import use_position_rotary
from megatron_patches.ranks.groups import initialize_model_parallel, server_pool_group
from megatron_patches.steps.step import Batch
from megatron_patches.te.choice import Linears
from megatron_patches.training.training_step import loss_and_tokens, sum_over_ranks, summed_loss_step

T = TypeVar("T")
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
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    sinks: bool = False
    layer_types: tuple[str, ...] = ("full",)
    window: int = 0
    variant: Variant = field(default_factory=Variant)

    @property
    def windows(self) -> tuple[int, ...]:
        """By layer; a case's configuration may say otherwise."""
        return windows_of(self.layer_types, self.window, self.layers)


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One comparison.

    Attributes:
        micro_batches: document lengths of each micro-batch.
        tp: tensor-parallel size, with sequence parallelism.
        pp: pipeline stages, which resend; what is left of the world is data parallel.
        ping_pong: two nano-batches.
        backward: keep or resend.
        recompute: nothing, every layer's MLP, or everything but core attention.
        offload: keep in host memory what backward needs.
        scheduler: "real": the planner's. "random": random cuts on random servers, to stress routes.
        ranks_per_node: consecutive servers that count as a node; 0 for those of one machine.
        seed: of weights, tokens and random plans.
        changed_document: (micro-batch, document) whose tokens are drawn anew.
        tie_embeddings: the output layer's weights are the embedding's.
        shape: the model's sizes.
        config: fields of megatron's configuration that differ from those of a LLaMA, with their values.
        options: what the model does that megatron's configuration has no field for.
        rotary_percent: how much of each head is rotated.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    tp: int = 1
    pp: int = 1
    ping_pong: bool = True
    backward: Literal["keep", "resend"] = "keep"
    recompute: Recompute = "none"
    offload: bool = False
    scheduler: Literal["real", "random"] = "real"
    ranks_per_node: int = 0
    seed: int = 1
    changed_document: tuple[int, int] | None = None
    tie_embeddings: bool = False
    shape: ParityShape = field(default_factory=ParityShape)
    config: Mapping[str, Any] = field(default_factory=dict)
    options: ModelOptions = MEGATRONS
    rotary_percent: float = 1.0

    @property
    def beyond_megatron(self) -> bool:
        """Unmodified Megatron-Core cannot compute it, so that the reference is written out in :mod:`plain_model`."""
        return self.options != MEGATRONS or bool(self.config.get("layernorm_zero_centered_gamma"))

    @property
    def apart(self) -> bool:
        """The reference computes each document by itself."""
        return self.config.get("window_size") is not None

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
    """How far a candidate is from the reference: relative norms, infinite for what is no number.

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
        name: relative_error(candidate.gradients[name], expected) for name, expected in reference.gradients.items()
    }
    worst = max(errors, key=errors.__getitem__)
    losses = (torch.tensor(each.loss, dtype=torch.float64) for each in (candidate, reference))
    return Difference(relative_error(*losses), errors[worst], worst)


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


def run_unmodified(
    case: ParityCase, dtype: torch.dtype, device: torch.device
) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """The reference, computed by the first rank alone; also returns the full weights. Every rank calls it together."""
    model = unmodified(case, dtype).to(device)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if case.beyond_megatron:
        return computed_once(lambda: _plain_outcome(case, model)), weights
    return computed_once(lambda: unmodified_outcome(case, model, device)), weights


def computed_once(compute: Callable[[], T]) -> T:
    """What the first rank computes, on every rank; it must not hold tensors of a GPU."""
    result = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, device=torch.device("cpu"))
    return cast(T, result[0])


def _plain_outcome(case: ParityCase, model: GPTModel) -> Outcome:
    """What :class:`PlainModel` computes with a model's weights."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    plain = PlainModel(weights, model.config, case.options, case.shape, case.rotary_percent)
    per_document = [[plain.losses(torch.from_numpy(ids)) for ids in documents] for documents in case_documents(case)]
    sums = [torch.stack([losses.sum() for losses in documents]) for documents in per_document]
    total, tokens = torch.stack([each.sum() for each in sums]).sum(), sum(len(x) for each in per_document for x in each)
    (total / tokens).backward()
    gradients = {name: weight.grad.double() for name, weight in weights.items() if weight.grad is not None}
    return Outcome(total.item() / tokens, gradients, [each.detach().double() for each in sums])


def unmodified_outcome(case: ParityCase, model: GPTModel, device: torch.device) -> Outcome:
    """What a model from :func:`unmodified` computes on this rank alone, also inside of Megatron's DDP."""
    total, tokens, per_document = 0.0, 0, []
    for documents in case_documents(case):
        lengths = np.array([len(document) for document in documents])
        rows = rank_batch(documents, lay_out(lengths, 1), 0)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        ids, labels, mask, positions = (
            torch.from_numpy(x).to(device) for x in (rows.tokens, rows.labels, rows.loss_mask, rows.positions)
        )
        each = [slice(stop - length, stop) for stop, length in zip(np.cumsum(lengths), lengths, strict=True)]
        losses = torch.zeros(len(ids), device=device)
        for part in each if case.apart else [slice(len(ids))]:
            model.rotary_pos_emb.set_positions(positions[part])
            hidden = hidden_scores(lengths, rows.positions, part).to(device)
            found = model(ids[None, part], None, hidden, labels=labels[None, part]).flatten() * mask[part]
            found.sum().backward()
            losses[part] = found.detach()
        total, tokens = total + losses.sum().item(), tokens + int(mask.sum())
        per_document.append(_per_document(losses, owner, len(lengths)))
    held = {name: getattr(p, "main_grad", p.grad) for name, p in model.named_parameters()}
    gradients = {name: gradient.double().cpu() / tokens for name, gradient in held.items()}
    return Outcome(total / tokens, gradients, [losses.cpu() for losses in per_document])


def unmodified(case: ParityCase, dtype: torch.dtype) -> GPTModel:
    """Megatron-Core's own model of the case on the CPU, but for the positions of its rotary embedding; of a case that
    is beyond Megatron ours, which holds the reference's weights."""
    initialize_model_parallel(1, 1, case.seed)
    config = _config(replace(case, recompute="none"), dtype)
    if case.beyond_megatron:
        spec = block_spec(config, options=case.options)
    else:
        layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
        # Megatron would take Transformer Engine's final norm where that is installed, which knows no float64.
        spec = TransformerBlockSubmodules([layer] * config.num_layers, WrappedTorchNorm)
    model = build_gpt(_shape(case), case.shape.vocabulary, config, spec, case.rotary_percent)
    if case.config or case.beyond_megatron:
        _draw_vectors(model)
    use_position_rotary(model)
    return model


def run_disaggregated(
    case: ParityCase,
    dtype: torch.dtype,
    device: torch.device,
    kernel: str,
    weights: dict[str, torch.Tensor],
    *,
    summed_loss: bool = True,
    linears: Linears = "auto",
    gradients: torch.dtype = torch.float32,
) -> Outcome:
    """The candidate, over all ranks, through the public API; every rank calls it and gets the same outcome.

    Args:
        case: what to compare.
        dtype: of weights and activations.
        device: this rank's.
        kernel: name of the core-attention kernel.
        weights: of the whole model.
        summed_loss: take the loss summed with the output layer, else Megatron's loss of every token.
        linears: see :class:`megatron_patches.api.CAD`.
        gradients: type in which they are added up.
    """
    cad, model = attached(case, dtype, device, kernel, weights, linears=linears)
    ddp = cad.data_parallel(model, distributed_optimizer=False, gradients=gradients)
    step = cad.plan_step(case_documents(case))
    forward_step = summed_loss_step if summed_loss else token_losses_step
    return outcome_of(case, cad, model, cad.forward_backward(step, forward_step, ddp), weights)


def outcome_of(
    case: ParityCase, cad: CAD, model: GPTModel, reports: Sequence[torch.Tensor], weights: dict[str, torch.Tensor]
) -> Outcome:
    """What a step of the case computed, the same on every rank; every rank calls it.

    Args:
        case: the case.
        cad: the case's.
        model: this rank's part, with the gradients of the step.
        reports: [summed loss, target tokens] of every micro-batch on the last stage.
        weights: of the whole model, for names and shapes.
    """
    total, tokens = sum_over_ranks(reports, cad.device)
    gradients = gather_gradients(model, _names(case, cad, model), weights, case.gated)
    return Outcome((total / tokens).item(), gradients, [])


def load_weights(case: ParityCase, cad: CAD, model: GPTModel, weights: dict[str, torch.Tensor]) -> None:
    """Copy this rank's shares of the whole model's ``weights`` into its part of it."""
    own = {name: weights[whole] for name, whole in _names(case, cad, model).items()}
    load_full_weights(model, own, parallel_state.get_tensor_model_parallel_rank(), case.gated)


def document_losses(
    case: ParityCase, dtype: torch.dtype, device: torch.device, kernel: str, weights: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Per micro-batch, [documents] summed loss of each document, by the disaggregated model over all ranks, which has
    one stage."""
    cad, model = attached(case, dtype, device, kernel, weights)
    step, first = cad.plan_step(case_documents(case)), np.cumsum([0, *map(len, case.micro_batches)])
    results = torch.zeros(int(first[-1]), dtype=torch.float64, device=device)
    for batch, layouts, drawn in zip(step.batches, step.plan.layouts, step.plan.drawn, strict=True):
        owner = [np.full(case.micro_batches[m][d], first[m] + d) for m, d in drawn.tolist()]
        rows = rank_batch(owner, layouts, cad.rank, align=cad.options.align, chunks=cad.options.shares)
        with torch.no_grad():
            losses = model(batch.tokens, batch.positions, batch.attention, labels=batch.labels) * batch.loss_mask
        results += _per_document(losses.flatten(), rows.tokens, len(results))
    dist.all_reduce(results, group=server_pool_group())
    return list(results.split([len(each) for each in case.micro_batches]))


def attached(
    case: ParityCase,
    dtype: torch.dtype,
    device: torch.device,
    kernel: str,
    weights: dict[str, torch.Tensor],
    *,
    disaggregate: bool = True,
    reduced: bool = True,
    linears: Linears = "auto",
) -> tuple[CAD, GPTModel]:
    """The case's CAD and this rank's part of its model, with its shares of the weights; every rank calls it.

    Args:
        case: the case.
        dtype: of weights and activations.
        device: this rank's.
        kernel: name of the core-attention kernel.
        weights: of the whole model.
        disaggregate: False leaves attention at home.
        reduced: whether the model will be wrapped in Megatron's DDP, which holds the gradients.
        linears: see :class:`megatron_patches.api.CAD`.
    """
    initialize_model_parallel(case.tp, case.pp, case.seed)
    config = _config(case, dtype)
    tokens = max(sum(lengths) for lengths in case.micro_batches)
    cad = CAD(
        config,
        tokens_per_rank=tokens,
        disaggregate=disaggregate,
        ping_pong=case.ping_pong,
        backward="resend" if case.pp > 1 else case.backward,
        kernel=kernel,
        ranks_per_node=case.ranks_per_node,
        recompute="all" if case.recompute == "all" and disaggregate else "none",
        offload=case.offload and disaggregate,
        linears=linears,
        model_options=case.options,
    )
    if case.scheduler == "random":
        cad.options = replace(cad.options, scheduler=partial(_random_plan, case))
    config.gradient_accumulation_fusion = reduced
    built = build_gpt(_shape(case), case.shape.vocabulary, config, cad.block_spec(), case.rotary_percent)
    model = cad.attach(built).to(device=device, dtype=dtype)
    load_weights(case, cad, model, weights)
    return cad, model


def token_losses_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """The forward step with Megatron's loss of every token; reports as summed_loss_step."""
    batch = next(batches)
    losses = model(batch.tokens, batch.positions, batch.attention, labels=batch.labels)
    return losses, lambda losses: loss_and_tokens(batch.loss_mask, (losses * batch.loss_mask).sum())


def _random_plan(case: ParityCase, layout: Layout, direction: Direction) -> Plan:
    return random_plan(layout, case.seed * 1000 + layout.tokens + (50 if direction == "backward" else 0))


def _shape(case: ParityCase) -> ParityShape:
    return replace(case.shape, tie_embeddings=case.tie_embeddings)


def _config(case: ParityCase, dtype: torch.dtype) -> TransformerConfig:
    """Of the case's model, whose weights are drawn the same way for every tensor-parallel size."""
    torch.manual_seed(case.seed)
    config = transformer_config(
        case.shape,
        dtype,
        sequence_parallel=case.tp > 1,
        recompute_mlp=case.recompute == "mlp",
        cpu_initialization=True,
    )
    return replace(config, **case.config) if case.config else config


def _draw_vectors(model: GPTModel) -> None:
    """Norms start at one and biases at zero, at which what uses them in a wrong place may still be right."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)


def _names(case: ParityCase, cad: CAD, model: GPTModel) -> dict[str, str]:
    """Names in the whole model of the parameters of this rank's part."""
    first = cad.stage * (case.shape.layers // case.pp)
    return names_in_whole(model, first, tied=case.tie_embeddings and cad.stage > 0)


def hidden_scores(lengths: np.ndarray, positions: np.ndarray, rows: slice = slice(None)) -> torch.Tensor:
    """[1, 1, tokens, tokens] bool: true where a packed token must not see another; of some rows."""
    owner, positions = np.repeat(np.arange(len(lengths)), lengths)[rows], positions[rows]
    return torch.from_numpy((owner[:, None] != owner[None]) | (positions[:, None] < positions[None]))[None, None]


def _per_document(losses: torch.Tensor, owner: np.ndarray, documents: int) -> torch.Tensor:
    """Sum each document's token losses in float64, where the order of a few additions does not show."""
    total = torch.zeros(documents, dtype=torch.float64, device=losses.device)
    return total.index_add_(0, torch.from_numpy(owner).to(losses.device), losses.double())
