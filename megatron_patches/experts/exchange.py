"""Sends rows (hidden states of tokens) to the ranks of their experts and back, as four nodes of autograd's graph.

    launch rows → join rows → (experts) → launch outputs → join outputs

In forward, a launch starts an all-to-all among expert-parallel ranks, and the next join waits for its end. In backward,
the join starts an all-to-all of gradients, and the launch waits for its end. A launch returns a *graph token* for the
join: a scalar that is never read, but gives autograd an edge between the two.

Shape suffixes: N rows of this rank, E experts, K experts of a row, H hidden. S rows that this rank sends; a row that
goes to two ranks counts twice. R rows that arrive from all ranks. P *pairs* of an arrived row and one of this rank's
experts that the row goes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from distca.runtime.nodes import graph_token
from megatron_patches.experts.dispatch import Dispatch


class Exchange:
    """The transfers of one layer for the N rows, in forward and backward. At most one transfer is under way at a time.

    Args:
        dispatch: which rows go to which ranks and experts.
        again: whether backward recomputes experts. Then forward frees the experts' input after use, and backward sends
            the input rows again, together with the gradients of the experts' outputs.
    """

    def __init__(self, dispatch: Dispatch, again: bool = False) -> None:
        self.dispatch, self.again = dispatch, again
        # For each tensor of the transfer: what arrives, what is sent, and the handle to wait for.
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self._sent_again_NH: torch.Tensor | None = None
        self._freed: tuple[torch.Tensor, int] | None = None  # the experts' input, and the bytes of its storage

    def launch_rows(self, hidden_NH: torch.Tensor, probs_NE: torch.Tensor) -> torch.Tensor:
        """Starts to send rows and the router's probabilities; returns the graph token for :meth:`join_rows`.

        Expert numbers are sent too, except when backward recomputes the layer: receivers have them from forward.
        """
        token: torch.Tensor = _LaunchRows.apply(hidden_NH, probs_NE, self)
        return token

    def join_rows(self, token: torch.Tensor, last_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for the rows; returns rows_PH and probs_P of this rank's pairs, sorted by expert.

        With ``last_first`` pairs of this rank's last expert come first."""
        joined: tuple[torch.Tensor, torch.Tensor] = _JoinRows.apply(token, self, last_first)
        return joined

    def launch_outputs(self, output_PH: torch.Tensor) -> torch.Tensor:
        """Starts to send back each arrived row's sum over its pairs; returns the graph token for :meth:`join_outputs`.

        ``output_PH`` has each pair's output times its probability, in the order of :meth:`join_rows`.
        """
        token: torch.Tensor = _LaunchOutputs.apply(output_PH, self)
        return token

    def join_outputs(self, token: torch.Tensor) -> torch.Tensor:
        """Waits for the outputs; returns [N, H] each row's sum over all its experts."""
        summed: torch.Tensor = _JoinOutputs.apply(token, self)
        return summed

    def start(self, tensors: Sequence[torch.Tensor], to_experts: bool) -> None:
        """Starts to send tensors: with ``to_experts`` rows to the ranks of experts, else sums back from those ranks.

        Tensors must not be changed until the transfer is finished.
        """
        assert not self._under_way
        for tensor in tensors:
            if self.dispatch.group.size() == 1:
                self._under_way.append((tensor, tensor, None))
            elif to_experts and self.dispatch.goes_everywhere and takes_lists(tensor):
                self._under_way.append(self._send_everywhere(tensor.contiguous()))
            else:
                given = self.dispatch.spread(tensor) if to_experts else tensor
                self._under_way.append(self._send(given.contiguous(), to_experts))

    def _send(self, given: torch.Tensor, to_experts: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
        ways = self.dispatch.sent, self.dispatch.received
        sent, received = ways if to_experts else ways[::-1]
        arriving = given.new_empty(sum(received), *given.shape[1:])
        work = dist.all_to_all_single(arriving, given, received, sent, group=self.dispatch.group, async_op=True)
        return arriving, given, work

    def _send_everywhere(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Sends all rows to all ranks, without a copy for each rank."""
        received, group = self.dispatch.received, self.dispatch.group
        arriving = given.new_empty(sum(received), *given.shape[1:])
        work = dist.all_to_all(list(arriving.split(received)), [given] * group.size(), group=group, async_op=True)
        return arriving, given, work

    def finish(self) -> list[torch.Tensor]:
        under_way, self._under_way = self._under_way, []
        for *_, work in under_way:
            if work is not None:
                work.wait()
        return [arriving for arriving, *_ in under_way]

    # The next five methods do nothing unless ``again``.

    def keep(self, hidden_NH: torch.Tensor) -> None:
        self._sent_again_NH = hidden_NH.detach() if self.again else None

    def remember(self, rows_PH: torch.Tensor) -> None:
        """Notes the experts' input, whose memory :meth:`free` frees and :meth:`restore` fills again."""
        if self.again:
            # ``restore`` later writes the same numbers into this memory. Autograd refuses saved tensors that were
            # written to, but does not notice writes to ``.data``.
            self._freed = rows_PH.data, rows_PH.untyped_storage().nbytes()

    def free(self) -> None:
        if self._freed is not None:
            self._freed[0].untyped_storage().resize_(0)

    def rows_again(self) -> list[torch.Tensor]:
        """Returns the [N, H] rows to send again, in a list with at most one tensor."""
        sent_again_NH, self._sent_again_NH = self._sent_again_NH, None
        return [] if sent_again_NH is None else [sent_again_NH]

    def restore(self, received: Sequence[torch.Tensor]) -> None:
        """Puts the experts' input back. ``received`` has the [R, H] rows that were sent again, or nothing."""
        for rows_RH in received:
            assert self._freed is not None
            (freed, size), self._freed = self._freed, None
            freed.untyped_storage().resize_(size)
            self.dispatch.by_expert(rows_RH, out=freed)


def takes_lists(tensor: torch.Tensor) -> bool:
    """Whether an all-to-all of this tensor may have lists of tensors: NCCL takes them, gloo does not."""
    return tensor.is_cuda


class _LaunchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: torch.Tensor, probs_NE: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.shape, way = exchange, probs_NE.shape, exchange.dispatch
        exchange.keep(hidden_NH)
        leaving = [hidden_NH, probs_NE.gather(1, way.expert_NK.long())]
        if not way.has_arrived:
            leaving.append(way.expert_NK)
        exchange.start(leaving, to_experts=True)
        return graph_token(hidden_NH.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        way = ctx.exchange.dispatch
        d_NH, d_probs_NK = (way.collected(each) for each in ctx.exchange.finish())
        d_probs_NE = d_probs_NK.new_zeros(ctx.shape).scatter_(1, way.expert_NK.long(), d_probs_NK)
        return d_NH, d_probs_NE, None


class _JoinRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, exchange: Exchange, last_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange, way = exchange, exchange.dispatch
        rows_RH, probs_RK, *expert_RK = exchange.finish()
        for each in expert_RK:
            way.arrive(each, last_first)
        rows_PH = way.by_expert(rows_RH)
        exchange.remember(rows_PH)
        return rows_PH, way.factors(probs_RK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_PH: torch.Tensor, d_probs_P: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        way = ctx.exchange.dispatch
        ctx.exchange.start((way.by_row(d_PH.contiguous()), way.factors_by_row(d_probs_P)), to_experts=False)
        return graph_token(d_PH.device), None, None


class _LaunchOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output_PH: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.start((exchange.dispatch.by_row(output_PH.contiguous()),), to_experts=False)
        if ctx.needs_input_grad[0]:
            exchange.free()
        return graph_token(output_PH.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        gradient_RH, *rows = ctx.exchange.finish()
        ctx.exchange.restore(rows)
        return ctx.exchange.dispatch.by_expert(gradient_RH), None


class _JoinOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        (back_SH,) = exchange.finish()
        return exchange.dispatch.collected(back_SH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NH: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        exchange = ctx.exchange
        exchange.start([d_NH, *exchange.rows_again()], to_experts=True)
        return graph_token(d_NH.device), None
