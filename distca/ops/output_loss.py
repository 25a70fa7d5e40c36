"""The output layer and its cross-entropy as one operation that never holds all logits.

The logits of 128K tokens over a vocabulary of 128K are 33 GB in bfloat16, and a float32 copy has twice as much. So
forward does all the work, a *chunk* of rows at a time. It computes the chunk's logits, reduces them to the loss, and
turns them into the gradient of the loss in place. From this it computes the gradients of the hidden rows and of the
weight. These are three matrix products, and no logits are computed twice. Backward only multiplies these gradients by
the gradient of the loss. So forward must know the weight of each row's loss (the loss mask).

With tensor parallelism each rank has some rows of the weight, a share of the vocabulary. N rows, H hidden size, V size
of this rank's share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from distca.device.sizes import LOGITS_BYTES
from distca.ops.cross_entropy import logits_to_gradient_, row_statistics, wide
from distca.ops.logits import AS_THEY_ARE, LogitTransform
from distca.ops.scaling import scaled
from distca.ops.triton import is_trusted


@dataclass(frozen=True)
class VocabularyShards:
    """The sharing of the output layer among tensor-parallel ranks.

    Attributes:
        group: the tensor-parallel ranks.
        sequence_parallel: whether each rank holds a contiguous share of the hidden rows; otherwise all hold all rows.
        vocabulary: number of token ids, if the weight has more rows. The further rows are padding, and are left out of
            the softmax. None without padding.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool
    vocabulary: int | None = None

    @property
    def shares(self) -> int:
        """The number of shares into which the hidden rows are cut."""
        return self.group.size() if self.sequence_parallel else 1

    def mask_padding_(self, logits: torch.Tensor) -> None:
        """Sets this rank's logits of padding to the smallest finite number.

        Beside any other logit its exponential is 0. It is finite, so that a rank with nothing but padding computes no
        nan.

        Args:
            logits: [..., V], overwritten.
        """
        if self.vocabulary is not None:
            real = max(self.vocabulary - self.group.rank() * logits.shape[-1], 0)
            logits[..., real:] = torch.finfo(logits.dtype).min


def output_loss(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    loss_mask_N: torch.Tensor,
    shards: VocabularyShards,
    logits_bytes: int = LOGITS_BYTES,
    transform: LogitTransform = AS_THEY_ARE,
) -> torch.Tensor:
    """Weighted sum of the rows' cross-entropies, the same on every tensor-parallel rank.

    Args:
        hidden_NH: input of the output layer; with sequence parallelism this rank's share of the rows.
        weight_VH: this rank's rows of the output layer's weight.
        labels_N: int64 target of every row (of all shares, in the order of the ranks).
        loss_mask_N: weight of every row's loss.
        shards: the sharing of the layer among ranks.
        logits_bytes: the largest size of one chunk's logits, in bytes. A ``transform`` with a limit needs three to five
            times as much for a while.
        transform: changes of logits before the softmax.

    Returns:
        A float32 scalar, float64 for float64 input. If gradients are enabled it can be differentiated once with respect
        to hidden_NH and weight_VH. The weight's gradient is added up in float32 and rounded once.
    """
    gradients = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    work = _Chunks(hidden_NH.detach(), weight_VH.detach(), labels_N, loss_mask_N, shards, logits_bytes, transform)
    return _OutputLoss.apply(hidden_NH, weight_VH, work, gradients)  # type: ignore[no-any-return]


def log_probabilities(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    shards: VocabularyShards,
    logits_bytes: int = LOGITS_BYTES,
    transform: LogitTransform = AS_THEY_ARE,
) -> torch.Tensor:
    """Logarithm of the probability of every row's target, the same on every tensor-parallel rank.

    The gradients of rows are known only in backward. So backward computes the logits again, a chunk at a time.

    Args:
        hidden_NH: input of the output layer; with sequence parallelism this rank's share of the rows.
        weight_VH: this rank's rows of the output layer's weight.
        labels_N: int64 target of every row (of all shares, in the order of the ranks).
        shards: the sharing of the layer among ranks.
        logits_bytes: the largest size of one chunk's logits, in bytes. A ``transform`` with a limit needs three to five
            times as much for a while.
        transform: changes of logits before the softmax.

    Returns:
        [N] float32, float64 for float64 input; can be differentiated once with respect to hidden_NH and weight_VH.
    """
    return _LogProbabilities.apply(  # type: ignore[no-any-return]
        hidden_NH, weight_VH, labels_N, shards, logits_bytes, transform
    )


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_N: torch.Tensor,
        shards: VocabularyShards,
        logits_bytes: int,
        transform: LogitTransform,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N)
        ctx.how = shards, logits_bytes, transform
        work = _Chunks(hidden_NH, weight_VH, labels_N, torch.zeros_like(labels_N, dtype=torch.bool), *ctx.how)
        work.run(gradients=False)
        return -work.row_losses.flatten()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_NH, weight_VH, labels_N = ctx.saved_tensors
        _, d_hidden_NH, d_weight_VH = _Chunks(hidden_NH, weight_VH, labels_N, -upstream_N, *ctx.how).run(gradients=True)
        return d_hidden_NH, d_weight_VH.to(weight_VH.dtype), None, None, None, None


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, work: _Chunks, gradients: bool
    ) -> torch.Tensor:
        loss, *both = work.run(gradients)
        ctx.save_for_backward(*both)
        ctx.dtype = weight_VH.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        d_hidden_NH, d_weight_VH = ctx.saved_tensors
        return *_scaled(d_hidden_NH, d_weight_VH, upstream, ctx.dtype), None, None


def _scaled(
    d_hidden_NH: torch.Tensor, d_weight_VH: torch.Tensor, upstream: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both gradients times the gradient of the loss; the weight's in ``dtype``."""
    rounded_VH = torch.empty_like(d_weight_VH, dtype=dtype)
    torch.mul(d_weight_VH, upstream, out=rounded_VH)
    return scaled(d_hidden_NH, upstream), rounded_VH


class _Chunks:
    """The computation over chunks of rows. With sequence parallelism a chunk has the same rows of every rank's share.

    Arguments are those of :func:`output_loss`.

    Attributes:
        row_losses: [shares, rows of a share] the rows' losses without weights, after :meth:`run`.
    """

    def __init__(
        self,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_N: torch.Tensor,
        loss_mask_N: torch.Tensor,
        shards: VocabularyShards,
        logits_bytes: int,
        transform: LogitTransform,
    ) -> None:
        self._hidden, self._weight, self._shards, self._transform = hidden_NH, weight_VH, shards, transform
        self._wide = wide(hidden_NH.dtype)
        first_column = shards.group.rank() * len(weight_VH)
        self._targets = (labels_N - first_column).view(shards.shares, -1)
        self._row_weights = loss_mask_N.to(self._wide).view(shards.shares, -1)
        # "limit" is the largest number of a share's rows in a chunk, "_step" the number that makes chunks equally
        # large.
        limit = max(logits_bytes // (len(weight_VH) * weight_VH.element_size() * shards.shares), 1)
        chunks = max(-(-len(hidden_NH) // limit), 1)
        self._step = max(-(-len(hidden_NH) // chunks), 1)
        self.row_losses = torch.zeros_like(self._row_weights)

    def run(self, gradients: bool) -> tuple[torch.Tensor, ...]:
        """Returns the loss and, with ``gradients``, those of the hidden rows (in their dtype) and of the weight (in at
        least float32)."""
        loss = torch.zeros((), dtype=self._wide, device=self._hidden.device)
        d_hidden = torch.empty_like(self._hidden) if gradients else None
        d_weight = torch.zeros_like(self._weight, dtype=self._wide) if gradients else None
        for rows, hidden in self._gathered():
            targets, row_weights = (x[:, rows].reshape(-1) for x in (self._targets, self._row_weights))
            logits = hidden @ self._weight.t()
            slope = self._transform.apply_(logits, gradients)
            self._shards.mask_padding_(logits)
            lse, target_logits = self._reduce(*row_statistics(logits, targets))
            losses = lse - target_logits
            self.row_losses[:, rows] = losses.view(self._shards.shares, -1)
            loss += (losses * row_weights).sum()
            if d_hidden is not None and d_weight is not None:
                logits_to_gradient_(logits, targets, lse, row_weights)
                if isinstance(slope, torch.Tensor) or slope != 1.0:
                    logits *= slope
                started = self._start_sum(logits, d_hidden[rows])
                add_product(d_weight, logits.t(), hidden)
                if started is not None:
                    started.wait()
            del logits, slope  # Their memory is then free for the next chunk.
        return (loss,) if d_hidden is None or d_weight is None else (loss, d_hidden, d_weight)

    def _gathered(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields for each chunk its rows of a share, as a slice, and these rows of all shares.

        The rows of the next chunk are gathered while one is used."""
        slices = [slice(begin, begin + self._step) for begin in range(0, len(self._hidden), self._step)]
        if self._shards.shares == 1:
            yield from ((rows, self._hidden[rows]) for rows in slices)
            return
        started = [self._start_gather(rows) for rows in slices[:1]]
        for rows, following in zip(slices, [*slices[1:], None], strict=True):
            hidden, handle = started.pop()
            handle.wait()
            if following is not None:
                started.append(self._start_gather(following))
            yield rows, hidden

    def _start_gather(self, rows: slice) -> tuple[torch.Tensor, Any]:
        mine = self._hidden[rows].contiguous()
        everyone = mine.new_empty(len(mine) * self._shards.shares, mine.shape[1])
        handle = dist.all_gather_into_tensor(everyone, mine, group=self._shards.group, async_op=True)
        return everyone, handle

    def _reduce(
        self, maximum_N: torch.Tensor, sum_N: torch.Tensor, target_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Combines the results of :func:`row_statistics` of all ranks.

        Returns [N] the logarithm of the sum of exponentials over the whole vocabulary, and [N] the target's logit."""
        if self._shards.group.size() == 1:
            return maximum_N + sum_N.log(), target_N
        highest_N = maximum_N.clone()
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=self._shards.group)
        both = torch.stack((sum_N * (maximum_N - highest_N).exp(), target_N))
        dist.all_reduce(both, group=self._shards.group)
        return highest_N + both[0].log(), both[1]

    def _start_sum(self, d_logits_NV: torch.Tensor, out: torch.Tensor) -> Any:
        """Starts writing the gradient of the hidden rows to ``out``; with sequence parallelism this rank's rows of it.

        Returns the pending collective, or None if there is none."""
        group = self._shards.group
        if self._shards.shares > 1:
            return dist.reduce_scatter_tensor(out, d_logits_NV @ self._weight, group=group, async_op=True)
        torch.mm(d_logits_NV, self._weight, out=out)
        return dist.all_reduce(out, group=group, async_op=True) if group.size() > 1 else None


def add_product(sum_VH: torch.Tensor, a_VN: torch.Tensor, b_NH: torch.Tensor) -> None:
    """sum_VH += a_VN @ b_NH; if torch can do so, without rounding the product to the narrower dtype of a and b."""
    if not sum_VH.is_cuda or sum_VH.dtype == a_VN.dtype:
        sum_VH.addmm_(a_VN.to(sum_VH.dtype), b_NH.to(sum_VH.dtype))
    elif "dtype_out" in torch.ops.aten.addmm.overloads() and is_trusted("weight gradients"):
        torch.addmm(sum_VH, a_VN, b_NH, out_dtype=sum_VH.dtype, out=sum_VH)
    else:  # torch before 2.8, or a product that failed its check: each product is rounded once.
        sum_VH += a_VN @ b_NH
