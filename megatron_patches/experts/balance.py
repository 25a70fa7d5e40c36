"""Losses that balance experts, over a micro-batch as one packed sequence, wherever and in which nano-batch rows lie.

The auxiliary loss of a layer is coeff x E / (topk x T^2) x sum over experts i of c_i x P_i: c_i of the micro-batch's T
rows have expert i among their ``topk`` best, and P_i adds up its scores. Megatron multiplies it by T where losses are
summed over tokens, which are divided by once at the end. c_i has no gradient. So forward counts, and one all-reduce
adds up the counts of all ranks of the stage. Backward gives every score coeff x E x c_i / (topk x T). This is the value
of Megatron-Core 0.19.2; 0.16.1 leaves out a factor of the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import once_differentiable

from distca.device.host_to_device import to_device
from distca.device.to_host import Question

Way = TypeVar("Way")


def coefficient(config: TransformerConfig, kind: str) -> float:
    """The coefficient of one kind of Megatron's balancing losses, "aux_loss" or "seq_aux_loss"."""
    kinds, values = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, values = [kinds], [values]  # type: ignore[list-item]
    assert isinstance(values, list)
    return float(sum(value for each, value in zip(kinds, values, strict=True) if each == kind))


class MicroBatchBalance:
    """The counts of a stage's routers, made while a micro-batch goes forward and read by its backward pass.

    Args:
        config: the model's configuration.
        layers: numbers of this stage's layers with experts, from 1.
        documents_N: [rows] int64 document of each of this rank's rows in the micro-batch; -1 in padding.
        nano_rows: rows of each nano-batch on this rank; they follow each other.
        documents: number of the micro-batch's documents, over all ranks.
        training: whether backward follows.
        peers: [ranks, nano-batches] rows of all expert-parallel ranks; None where there are no others.
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
        self.document_of = documents_N.split(list(nano_rows))
        experts, device = config.num_moe_experts, documents_N.device
        assert experts is not None
        self.per_document = coefficient(config, "seq_aux_loss") > 0
        groups = documents if self.per_document else 1
        # By layer: rows that an expert is among the best of, by document where asked; rows that it gets.
        self._best = torch.zeros(len(layers), groups, experts, dtype=torch.float32, device=device)
        self._load = torch.zeros(len(layers), experts, dtype=torch.float32, device=device)
        self._entropy = torch.zeros(len(layers), dtype=torch.float32, device=device)
        self._counting = True
        self._ways: dict[tuple[int, int], Any] = {}

    @classmethod
    def of(
        cls,
        config: TransformerConfig,
        layers: Sequence[int],
        documents_N: torch.Tensor,
        nano_rows: Sequence[int],
        documents: int,
    ) -> MicroBatchBalance:
        """Returns the counts of a micro-batch that goes forward now, with backward where gradients are enabled. Its
        rows are those that tensor-parallel ranks share."""
        chunks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        mine = documents_N.chunk(chunks)[parallel_state.get_tensor_model_parallel_rank() if chunks > 1 else 0]
        rows = [each // chunks for each in nano_rows]
        return cls(config, layers, mine, rows, documents, torch.is_grad_enabled(), _rows_of_peers(rows, mine.device))

    def half(self, number: int) -> Half:
        """The rows of nano-batch ``number``."""
        return Half(self, number, self.document_of[number])

    def rows_of_peers(self, half: Half) -> list[int]:
        """Rows of the nano-batch on every expert-parallel rank."""
        if self._peers is None:
            return [len(half.document_N)]
        rows: list[int] = self._peers.read()[:, half.number].tolist()
        return rows

    def way(self, layer: int, half: Half, find: Callable[[], Way]) -> Way:
        """The way that the rows of a layer's nano-batch go. It is found in the first pass: a layer that is computed
        again sends its rows the same way, and asks nobody."""
        if not self.training:
            return find()
        if self._counting:
            self._ways[layer, half.number] = find()
        return self._ways[layer, half.number]

    def count(self, layer: int, half: Half, best_NE: torch.Tensor, chosen_NE: torch.Tensor, entropy_N: Any) -> None:
        """Count a nano-batch's rows; nothing while it is recomputed, or without backward.

        Args:
            layer: the layer's number.
            half: the nano-batch.
            best_NE: [rows, experts] bool, the experts with the highest scores.
            chosen_NE: [rows, experts] bool, those that rows go to.
            entropy_N: [rows] entropy of the scores.
        """
        if not (self._counting and self.training):
            return
        index, real = self._index[layer], half.real_N[:, None]
        best = (best_NE & real).float()
        if self.per_document:
            self._best[index].index_add_(0, half.document_N.clamp(min=0), best)
        else:
            self._best[index, 0] += best.sum(0)
        self._load[index] += (chosen_NE & real).sum(0)
        self._entropy[index] += (entropy_N * half.real_N).sum()

    def finish(self) -> None:
        """Add up the counts of all ranks of the stage, which call it together at the end of the forward pass."""
        self._counting = False
        parts = [self._best.flatten(), self._load.flatten(), self._entropy]
        everything = torch.cat(parts)
        dist.all_reduce(everything, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        best, load, entropy = everything.split([each.numel() for each in parts])
        self._best, self._load, self._entropy = best.view_as(self._best), load.view_as(self._load), entropy

    def report(self) -> torch.Tensor:
        """[layers, experts + 1] float32: rows that each expert got on all ranks, and the entropies' sum."""
        return torch.cat((self._load, self._entropy[:, None]), 1)

    def gradient(self, layer: int, half: Half) -> torch.Tensor:
        """[rows, experts] or [1, experts] gradient of the scores of each row that is no padding."""
        assert not self._counting, "backward comes after the whole forward pass"
        config, best_DE = self._config, self._best[self._index[layer]]
        rows_times_topk = best_DE.sum(1, keepdim=True).clamp(min=1)
        share_DE = best_DE / rows_times_topk * best_DE.shape[1]
        if self.per_document:
            whole = best_DE.sum(0, keepdim=True)
            whole = whole / whole.sum().clamp(min=1) * best_DE.shape[1] * coefficient(config, "aux_loss")
            return share_DE[half.document_N.clamp(min=0)] * coefficient(config, "seq_aux_loss") + whole
        return share_DE * coefficient(config, "aux_loss")


def _rows_of_peers(rows: Sequence[int], device: torch.device) -> Question | None:
    """Every expert-parallel rank calls it at the beginning of a micro-batch."""
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() == 1:
        return None
    gathered = torch.empty(group.size() * len(rows), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, to_device(np.array(rows), device), group=group)
    return Question(gathered.view(group.size(), -1))


@dataclass(frozen=True)
class Half:
    """One nano-batch's rows.

    Attributes:
        balance: the micro-batch's counts.
        number: the nano-batch's number, from 0.
        document_N: [rows] int64 document of each row; -1 in padding.
    """

    balance: MicroBatchBalance
    number: int
    document_N: torch.Tensor

    @property
    def real_N(self) -> torch.Tensor:
        """[rows] bool, false in padding."""
        return self.document_N >= 0


@dataclass(frozen=True)
class LayerLoad:
    """How a layer's rows were spread over its experts.

    Attributes:
        rows_E: [experts] float32 rows that each expert got, on all ranks of the stage.
        entropy: float32 scalar, the mean over rows of the entropy of the router's scores, in nats.
    """

    rows_E: torch.Tensor
    entropy: torch.Tensor


class ExpertLoad:
    """How a stage's rows were spread over experts in micro-batches that were trained on.

    Args:
        layers: numbers of the stage's layers with experts, from 1.
        topk: experts of a row.
    """

    def __init__(self, layers: Sequence[int], topk: int) -> None:
        self.layers, self._topk = layers, topk
        self._total: torch.Tensor | None = None

    def add(self, balance: MicroBatchBalance) -> None:
        """Finish a micro-batch's counts; every rank of the stage calls it at the end of its forward pass."""
        balance.finish()
        report = balance.report()
        self._total = report if self._total is None else self._total + report

    def take(self) -> dict[int, LayerLoad]:
        """Returns the loads of all micro-batches since the last call, by number of the layer; empty without any."""
        total, self._total = self._total, None
        if total is None:
            return {}
        rows = total[:, :-1].sum(1).clamp(min=1) / self._topk
        loads = zip(self.layers, total[:, :-1], total[:, -1] / rows, strict=True)
        return {number: LayerLoad(rows_E, entropy) for number, rows_E, entropy in loads}


def balanced(probs: torch.Tensor, scores_NE: torch.Tensor, half: Half, layer: int) -> torch.Tensor:
    """``probs``, whose backward gives ``scores_NE`` the gradient of the balancing losses."""
    attached: torch.Tensor = _Balanced.apply(probs, scores_NE, half, layer)
    return attached


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, scores_NE: torch.Tensor, half: Half, layer: int) -> torch.Tensor:
        ctx.of = half, layer, scores_NE.dtype, scores_NE.shape
        return probs.view_as(probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # type: ignore[override]
        half, layer, dtype, shape = ctx.of
        gradient = (half.balance.gradient(layer, half) * half.real_N[:, None]).to(dtype)
        return d_probs, gradient.expand(shape), None, None


def with_loss(activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``activation``, whose backward adds the gradient of ``loss``, a scalar, to that of everything."""
    attached: torch.Tensor = _WithLoss.apply(activation, loss)
    return attached


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss = loss.new_ones(())
        return activation.view_as(activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return d, ctx.loss
