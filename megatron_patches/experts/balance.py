"""Auxiliary losses that spread rows evenly over a layer's experts, and counts of the rows that each expert gets.

A layer's router gives each row (a token's hidden vector) a score for each of E experts, and sends the row to ``topk``
experts. Megatron's auxiliary loss of a layer, "aux_loss", is

    coeff x E / (topk x T^2) x sum over experts i of c_i x P_i

T is the number of rows in the micro-batch. c_i is the number of rows with expert i among their ``topk`` highest scores.
P_i is the sum of all rows' scores for expert i. "seq_aux_loss" is this formula for each document, with its T, c_i, P_i.

Here a loss is multiplied by its T, because a step ends with a division of gradients by the step's number of tokens. c_i
has no gradient. So the loss's gradient with respect to a row's score for expert i is coeff x E x c_i / (topk x T).
Forward counts c_i on each rank, one all-reduce adds up the counts of all ranks of the pipeline stage, and backward
reads the sums.

If Megatron's configuration has ``moe_grad_scale_func``, these losses are multiplied by what that function returns.
Otherwise they are scaled like the model's loss: by ``grad_scale_func``, if the configuration has it.

A *nano-batch* is the whole micro-batch, or one of its two parts. Shape suffixes: N rows on this rank; E experts; D
documents of the micro-batch, but 1 without "seq_aux_loss".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import once_differentiable

from distca.device.host_to_device import to_device
from distca.device.to_host import Question
from megatron_patches.experts.dispatch import Dispatch
from megatron_patches.experts.grouped import FoundExperts


def coefficient(config: TransformerConfig, kind: str) -> float:
    """Returns the coefficient of the loss ``kind``, "aux_loss" or "seq_aux_loss"; 0 without this loss."""
    kinds, values = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, values = [kinds], [values]  # type: ignore[list-item]
    assert isinstance(values, list)
    return float(sum(value for each, value in zip(kinds, values, strict=True) if each == kind))


class MicroBatchBalance:
    """Counts each expert's rows in one micro-batch, for the layers of one pipeline stage.

    Args:
        layers: numbers of this stage's layers with experts; the model's first layer is 1.
        documents_N: int64 number of each row's document, for this rank's rows, one nano-batch after the other; -1 for
            padding.
        nano_rows: number of this rank's rows in each nano-batch.
        documents: number of documents in the micro-batch, over all ranks.
        training: whether rows are counted; False in evaluation.
        peers: [expert-parallel ranks, nano-batches] numbers of rows, on their way to the host. None without expert
            parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layers: Sequence[int],
        documents_N: torch.Tensor,
        nano_rows: Sequence[int],
        documents: int,
        training: bool,
        peers: Question | None = None,
    ) -> None:
        self._config, self.training, self._peers = config, training, peers
        self._index = {number: index for index, number in enumerate(layers)}
        self.document_of, self._is_real = (each.split(list(nano_rows)) for each in (documents_N, documents_N >= 0))
        experts, device = config.num_moe_experts, documents_N.device
        assert experts is not None
        self.loss_scale = _loss_scale(config, device) if training else 1.0
        self.per_document = coefficient(config, "seq_aux_loss") > 0
        # Padding rows read the counts of document 0. These counts must exist even if the plan has moved all documents
        # to other micro-batches.
        groups = max(documents, 1) if self.per_document else 1
        # _best: the counts c_i. _load: the rows that each expert gets. _entropy: the sum of all rows' entropies.
        self._best = torch.zeros(len(layers), groups, experts, dtype=torch.float32, device=device)
        self._load = torch.zeros(len(layers), experts, dtype=torch.float32, device=device)
        self._entropy = torch.zeros(len(layers), dtype=torch.float32, device=device)
        self._counting = True
        self._dispatches: dict[tuple[int, int], Dispatch] = {}
        self._experts: dict[int, FoundExperts] = {}

    @classmethod
    def of(
        cls,
        config: TransformerConfig,
        layers: Sequence[int],
        documents_N: torch.Tensor,
        nano_rows: Sequence[int],
        documents: int,
    ) -> MicroBatchBalance:
        """Returns zero counts for a micro-batch; all expert-parallel ranks call this method together.

        With sequence parallelism ``documents_N`` has the rows of all tensor-parallel ranks, one rank after the other.
        ``nano_rows`` has the number of rows of each whole nano-batch.
        """
        chunks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        mine = documents_N.chunk(chunks)[parallel_state.get_tensor_model_parallel_rank() if chunks > 1 else 0]
        rows = [each // chunks for each in nano_rows]
        return cls(config, layers, mine, rows, documents, torch.is_grad_enabled(), _rows_of_peers(rows, mine.device))

    def nano_batch(self, number: int) -> NanoBatch:
        return NanoBatch(self, number, self.document_of[number], self._is_real[number])

    def rows_of_peers(self, nano_batch: NanoBatch) -> list[int]:
        if self._peers is None:
            return [len(nano_batch.document_N)]
        rows: list[int] = self._peers.read()[:, nano_batch.number].tolist()
        return rows

    def dispatch(self, layer: int, nano_batch: NanoBatch, make: Callable[[], Dispatch]) -> Dispatch:
        """Returns ``make()`` in forward, and forward's result when backward recomputes the layer."""
        if not self.training:
            return make()
        if self._counting:
            self._dispatches[layer, nano_batch.number] = make()
        return self._dispatches[layer, nano_batch.number]

    def experts(self, layer: int, look: Callable[[], FoundExperts]) -> FoundExperts:
        """Returns ``look()`` for a layer's first nano-batch, and the same result later, in backward too."""
        if layer not in self._experts:
            self._experts[layer] = look()
        return self._experts[layer]

    def count(
        self, layer: int, nano_batch: NanoBatch, best_NE: torch.Tensor, chosen_NE: torch.Tensor, scores_NE: torch.Tensor
    ) -> None:
        """Adds a nano-batch's rows to the counts of a layer; does nothing in backward and in evaluation.

        Args:
            best_NE: bool, true for the ``topk`` experts with a row's highest scores.
            chosen_NE: bool, true for the experts to which a row is sent. If it is ``best_NE`` itself, rows are added up
                once for both.
            scores_NE: the scores. The sum of a row's scores is 1.
        """
        if not (self._counting and self.training):
            return
        index, real = self._index[layer], nano_batch.real_N[:, None]
        best, same = (best_NE & real).float(), chosen_NE is best_NE
        load_E = (best if same else chosen_NE & real).sum(0)
        self._load[index] += load_E
        if self.per_document:
            self._best[index].index_add_(0, nano_batch.document_N.clamp(min=0), best)
        else:
            self._best[index, 0] += load_E if same else best.sum(0)
        negative_entropy_N = torch.special.xlogy(scores_NE, scores_NE).sum(-1)
        self._entropy[index] -= (negative_entropy_N * nano_batch.real_N).sum()

    def finish(self) -> None:
        """Adds up the counts of all ranks of the pipeline stage, which call this method together."""
        self._counting = False
        parts = [self._best.flatten(), self._load.flatten(), self._entropy]
        everything = torch.cat(parts)
        dist.all_reduce(everything, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        best, load, entropy = everything.split([each.numel() for each in parts])
        self._best, self._load, self._entropy = best.view_as(self._best), load.view_as(self._load), entropy

    def report(self) -> torch.Tensor:
        """Returns [layers, E + 1] float32: the number of rows of each expert, then the sum of the rows' entropies."""
        return torch.cat((self._load, self._entropy[:, None]), 1)

    def gradient(self, layer: int, nano_batch: NanoBatch) -> torch.Tensor:
        """Returns the auxiliary losses' gradient with respect to scores: [N, E], or [1, E] if it is equal for all rows.

        Values for padding rows are arbitrary.
        """
        assert not self._counting, "backward comes after the whole forward pass"
        config, best_DE = self._config, self._best[self._index[layer]]
        # The sum of all c_i is T x topk, so ``share_DE`` is E x c_i / (topk x T).
        rows_times_topk = best_DE.sum(1, keepdim=True).clamp(min=1)
        share_DE = best_DE / rows_times_topk * best_DE.shape[1]
        of_micro_batch, of_document = (
            coefficient(config, each) * self.loss_scale for each in ("aux_loss", "seq_aux_loss")
        )
        if self.per_document:
            whole = best_DE.sum(0, keepdim=True)  # c_i of "aux_loss", over all documents
            whole = whole / whole.sum().clamp(min=1) * best_DE.shape[1] * of_micro_batch
            return share_DE[nano_batch.document_N.clamp(min=0)] * of_document + whole
        return share_DE * of_micro_batch


def _loss_scale(config: TransformerConfig, device: torch.device) -> torch.Tensor | float:
    """Returns the factor, a scalar tensor or 1.0, by which Megatron's schedules scale losses for balance."""
    own = getattr(config, "moe_grad_scale_func", None)  # not in Megatron-Core 0.16.1
    if own is None and config.grad_scale_func is None:
        return 1.0
    found = config.grad_scale_func(torch.ones(1, device=device)) if own is None else own()
    return torch.as_tensor(found, device=device).reshape(())


def _rows_of_peers(rows: Sequence[int], device: torch.device) -> Question | None:
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() == 1:
        return None
    gathered = torch.empty(group.size() * len(rows), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, to_device(np.array(rows), device), group=group)
    return Question(gathered.view(group.size(), -1))


@dataclass(frozen=True)
class NanoBatch:
    """The rows of one nano-batch on this rank; ``document_N`` is as ``documents_N`` in :class:`MicroBatchBalance`.

    ``real_N`` is bool, false for padding."""

    balance: MicroBatchBalance
    number: int
    document_N: torch.Tensor
    real_N: torch.Tensor


@dataclass(frozen=True)
class LayerLoad:
    """How a layer's rows were spread over its experts.

    Attributes:
        rows_E: float32 number of rows of each expert, over all ranks of the pipeline stage.
        entropy: float32 scalar, the mean entropy of a row's scores, in nats.
    """

    rows_E: torch.Tensor
    entropy: torch.Tensor


class ExpertLoad:
    """The counts of all micro-batches since the last :meth:`take`, for the log.

    Attributes:
        total: the sum of :meth:`MicroBatchBalance.report` over micro-batches; None if there were none. Code must not
            change the tensor in place, because ``lost_step.py`` keeps it and restores it after a failed step.
    """

    def __init__(self, layers: Sequence[int], topk: int) -> None:
        self.layers, self._topk = layers, topk
        self.total: torch.Tensor | None = None

    def add(self, balance: MicroBatchBalance) -> None:
        """Adds a micro-batch's counts; all ranks of the pipeline stage call this method together after forward."""
        balance.finish()
        report = balance.report()
        self.total = report if self.total is None else self.total + report

    def take(self) -> dict[int, LayerLoad]:
        """Returns each layer's load, by the layer's number from 1, and sets the counts to zero."""
        total, self.total = self.total, None
        if total is None:
            return {}
        rows = total[:, :-1].sum(1).clamp(min=1) / self._topk  # each row is counted once for each of its experts
        loads = zip(self.layers, total[:, :-1], total[:, -1] / rows, strict=True)
        return {number: LayerLoad(rows_E, entropy) for number, rows_E, entropy in loads}


def balanced(probs: torch.Tensor, scores_NE: torch.Tensor, nano_batch: NanoBatch, layer: int) -> torch.Tensor:
    """Returns ``probs`` unchanged; backward gives ``scores_NE`` the gradient of the auxiliary losses."""
    attached: torch.Tensor = _Balanced.apply(probs, scores_NE, nano_batch, layer)
    return attached


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probs: torch.Tensor, scores_NE: torch.Tensor, nano_batch: NanoBatch, layer: int
    ) -> torch.Tensor:
        ctx.of = nano_batch, layer, scores_NE.dtype, scores_NE.shape
        return probs.view_as(probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # type: ignore[override]
        nano_batch, layer, dtype, shape = ctx.of
        gradient = (nano_batch.balance.gradient(layer, nano_batch) * nano_batch.real_N[:, None]).to(dtype)
        return d_probs, gradient.expand(shape), None, None


def with_loss(activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Returns ``activation`` unchanged; its backward also runs backward of the scalar ``loss``, the router's z-loss.

    ``loss`` must have been multiplied by its coefficient and by the ``loss_scale`` of :class:`MicroBatchBalance`."""
    attached: torch.Tensor = _WithLoss.apply(activation, loss)
    return attached


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.d_loss = loss.new_ones(())
        return activation.view_as(activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return d, ctx.d_loss
