"""Hold the disaggregated transformer block alone against megatron-core's, in any precision.

The full model's loss is float32 inside megatron-core; the block is not, so in float64 this comparison is exact to
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from distca.attention import TaskBatch
from distca.cad_options import KernelName
from distca.data.batch import rank_batch
from distca.parity.cases import ParityCase, case_documents
from distca.parity.disaggregated import attached
from distca.parity.plain_model import PlainModel
from distca.parity.unmodified import computed_once, hidden_scores, unmodified_model
from distca.testing.reference_attention import relative_error
from megatron_patches.model.whole_parameters import divisions_of, gather_shares, load_full_weights
from megatron_patches.steps.batch_context import DisaggregatedMicroBatch, PackedMicroBatch


@dataclass(frozen=True)
class BlockOutcome:
    """The results of a block, over all rows of the micro-batch; CPU tensors.

    Attributes:
        output: [tokens, hidden].
        input_gradient: [tokens, hidden].
        weight_gradients: full gradient of every parameter.
    """

    output: torch.Tensor
    input_gradient: torch.Tensor
    weight_gradients: dict[str, torch.Tensor]

    def error(self, reference: BlockOutcome) -> dict[str, float]:
        """Relative norms of the differences, infinite for what is no number: output, input gradient, worst weight
        gradient."""
        return {
            "output": relative_error(self.output, reference.output),
            "input_gradient": relative_error(self.input_gradient, reference.input_gradient),
            "weight_gradient": max(
                relative_error(self.weight_gradients[name], expected)
                for name, expected in reference.weight_gradients.items()
            ),
        }


def rounded_weights(case: ParityCase, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The case's full weights, rounded to ``dtype`` and held in float64. Every rank calls it together."""
    return {name: p.detach().to(dtype).double() for name, p in unmodified_model(case, torch.float32).named_parameters()}


def block_unmodified(
    case: ParityCase, dtype: torch.dtype, device: torch.device, weights: dict[str, torch.Tensor]
) -> BlockOutcome:
    """Megatron-Core's own block on the case's first micro-batch, or the one written out, by the first rank alone; every
    rank calls it."""
    model = unmodified_model(case, dtype).to(device=device, dtype=dtype)
    lengths = np.array(case.micro_batches[0])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return computed_once(lambda: _alone(case, model, weights, positions, lengths))


def block_packed(
    case: ParityCase, dtype: torch.dtype, device: torch.device, kernel: KernelName, weights: dict[str, torch.Tensor]
) -> BlockOutcome:
    """Megatron-Core's block and layers with a packed-document kernel and the case's tensor and sequence parallelism.

    This is what training runs where core attention stays at home. Every data-parallel rank computes all documents.
    """
    # Recomputation changes no figure, and megatron's own of an MLP with biases never ends: its checkpoint returns one.
    kept = replace(case, recompute="none")
    cad, model = attached(kept, dtype, device, kernel, weights, disaggregate=False, reduced=False)
    lengths = np.array(case.micro_batches[0])
    tokens = int(lengths.sum())
    borders = np.concatenate(([0], np.cumsum(lengths)))
    padding = -tokens % cad.options.align
    positions = np.concatenate([*(np.arange(length) for length in lengths), np.zeros(padding, np.int64)])
    numbers = np.concatenate((np.arange(1, tokens + 1), np.zeros(padding, np.int64)))
    documents = PackedMicroBatch(TaskBatch.of(borders, borders, device), tokens)
    outcome = _share(case, model, weights, positions, numbers, documents, tokens)
    replicas = dist.get_world_size() // case.tp
    return BlockOutcome(
        outcome.output / replicas,
        outcome.input_gradient / replicas,
        {name: gradient / replicas for name, gradient in outcome.weight_gradients.items()},
    )


def _alone(
    case: ParityCase,
    model: GPTModel,
    weights: dict[str, torch.Tensor],
    positions: np.ndarray,
    lengths: np.ndarray,
) -> BlockOutcome:
    load_full_weights(model, weights, 0)
    parameter = next(model.parameters())
    hidden, weight = _rows(case, len(positions), parameter.dtype, parameter.device)
    if case.beyond_megatron:
        named = dict(model.named_parameters())
        plain = PlainModel(named, model.config, case.options, case.shape, case.rotary_percent)
        outputs = [plain.block(document) for document in hidden.split(lengths.tolist())]
        return _outcome(model, hidden, torch.cat(outputs), weight)
    outputs = []
    ends = np.cumsum(lengths).tolist()
    for part in map(slice, [0, *ends], ends) if case.apart else [slice(len(positions))]:
        angles = None  # latent attention counts from 0 by itself, as documents are apart
        if not model.config.multi_latent_attention:
            model.rotary_pos_emb.set_positions(torch.from_numpy(positions[part]).to(parameter.device))
            angles = model.rotary_pos_emb()
        scores = hidden_scores(lengths, positions, part).to(parameter.device)
        outputs.append(model.decoder(hidden[part, None], scores, rotary_pos_emb=angles)[:, 0])
    return _outcome(model, hidden, torch.cat(outputs), weight)


def _outcome(model: GPTModel, hidden: torch.Tensor, output: torch.Tensor, weight: torch.Tensor) -> BlockOutcome:
    (output * weight).sum().backward()
    assert hidden.grad is not None
    gradients = {name: p.grad.cpu() for name, p in model.decoder.named_parameters()}
    return BlockOutcome(output.detach().cpu(), hidden.grad.cpu(), gradients)


def _share(
    case: ParityCase,
    model: GPTModel,
    weights: dict[str, torch.Tensor],
    positions: np.ndarray,
    numbers: np.ndarray,
    attention: DisaggregatedMicroBatch | PackedMicroBatch,
    tokens: int,
) -> BlockOutcome:
    """Run this rank's share of a block and gather everything, summed over data-parallel ranks.

    Args:
        case: the case.
        model: of this tensor-parallel rank.
        weights: full weights.
        positions: position of each row of the data-parallel rank.
        numbers: row of the packed micro-batch that each of them is, counted from 1; 0 for padding.
        attention: how core attention runs.
        tokens: rows of the packed micro-batch.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    parameter = next(model.parameters())
    dtype, device = parameter.dtype, parameter.device
    model.rotary_pos_emb.set_positions(torch.from_numpy(positions).to(device))
    share = len(numbers) // case.tp
    mine = torch.from_numpy(numbers[tp_rank * share : (tp_rank + 1) * share]).to(device)
    full, weight = _rows(case, tokens, dtype, device)
    padded = torch.cat((full.new_zeros(1, full.shape[1]), full.detach()))
    hidden = padded[mine].requires_grad_()
    output = model.decoder(hidden[:, None], attention, rotary_pos_emb=model.rotary_pos_emb())[:, 0]
    real = mine > 0
    (output[real] * weight[mine[real] - 1]).sum().backward()
    assert hidden.grad is not None
    gradients, divisions = {}, divisions_of(model)
    for name, part in model.decoder.named_parameters():
        # As in training: nano-batches and ranks are added up in float32.
        gradient = torch.zeros_like(part, dtype=torch.promote_types(dtype, torch.float32))
        gradient += part.grad
        dist.all_reduce(gradient, group=parallel_state.get_data_parallel_group())
        if getattr(part, "sequence_parallel", False):
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        gradients[name] = gather_shares(name, gradient, weights[f"decoder.{name}"].shape, divisions)
    return BlockOutcome(_everywhere(output.detach(), mine, tokens), _everywhere(hidden.grad, mine, tokens), gradients)


def block_disaggregated(
    case: ParityCase, dtype: torch.dtype, device: torch.device, kernel: KernelName, weights: dict[str, torch.Tensor]
) -> BlockOutcome:
    """The disaggregated block over all ranks; every rank calls it and gets the same outcome."""
    cad, model = attached(case, dtype, device, kernel, weights, reduced=False)
    step = cad.plan_step(case_documents(case)[:1])
    lengths = np.array(case.micro_batches[0])
    # Documents whose tokens are their rows in the packed micro-batch, counted from 1; padding reads as 0.
    numbers = np.split(np.arange(1, lengths.sum() + 1), np.cumsum(lengths)[:-1])
    rows = rank_batch(numbers, step.plan.layouts[0], cad.rank, align=cad.options.align, chunks=cad.options.shares)
    (batch,) = step.batches
    return _share(case, model, weights, rows.positions, rows.tokens, batch.attention, int(lengths.sum()))


def _rows(case: ParityCase, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeded input rows that require gradients, and the weights of the output's sum."""
    generator = torch.Generator().manual_seed(case.seed + 7)
    hidden, weight = (
        # Rounded first, so that every precision starts from the same numbers.
        torch.randn(tokens, case.shape.hidden, generator=generator).bfloat16().to(device, dtype)
        for _ in range(2)
    )
    return hidden.requires_grad_(), weight


def _everywhere(rows: torch.Tensor, numbers: torch.Tensor, tokens: int) -> torch.Tensor:
    """All ranks' rows in their places."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    whole = torch.zeros(tokens + 1, rows.shape[1], dtype=wide, device=rows.device)
    whole[numbers] = rows.to(wide)
    whole[0] = 0
    dist.all_reduce(whole)
    return whole[1:].cpu()
