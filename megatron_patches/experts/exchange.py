"""One nano-batch's rows on their way to experts and back, as four autograd nodes.

    launch rows → join rows → (experts) → launch outputs → join outputs

Between a launch and its join, callers put the other nano-batch's compute (distca/runtime/ping_pong.py). Backward runs
the nodes in reverse: it launches gradients where forward joined, and joins them where forward launched. Where experts
are computed again in backward, their inputs are not kept: they are sent once more beside the gradients of their
outputs. Shape suffixes are as in ``dispatch.py``.
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
    """One nano-batch's exchanges, of which at most one is under way.

    Args:
        dispatch: which rows go where.
        again: rows for experts are sent again in backward.
    """

    def __init__(self, dispatch: Dispatch, again: bool = False) -> None:
        self.dispatch, self.again = dispatch, again
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, Any]] = []  # what arrives, what is sent, and its work
        self._read_NH: torch.Tensor | None = None
        self._rows: tuple[torch.Tensor, int] | None = None  # by expert, and the bytes that they take

    # Public: the four nodes, called in this order.

    def launch_rows(self, hidden_NH: torch.Tensor, probs_NE: torch.Tensor) -> torch.Tensor:
        """Start sending rows and their probabilities to experts; returns the graph token for :meth:`join_rows`."""
        token: torch.Tensor = _LaunchRows.apply(hidden_NH, probs_NE, self)
        return token

    def join_rows(self, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the rows; returns rows_PH and probs_P of this rank's pairs, by expert."""
        joined: tuple[torch.Tensor, torch.Tensor] = _JoinRows.apply(token, self)
        return joined

    def launch_outputs(self, output_PH: torch.Tensor) -> torch.Tensor:
        """Start sending back each row's sum of its experts' outputs, in the order of :meth:`join_rows`; returns the
        graph token for :meth:`join_outputs`."""
        token: torch.Tensor = _LaunchOutputs.apply(output_PH, self)
        return token

    def join_outputs(self, token: torch.Tensor) -> torch.Tensor:
        """Wait for the outputs; returns [N, H] the sum over each row's experts."""
        summed: torch.Tensor = _JoinOutputs.apply(token, self)
        return summed

    # For the nodes.

    def start(self, tensors: Sequence[torch.Tensor], to_experts: bool) -> None:
        """Begin to send rows to the ranks of their experts, or back from there."""
        ways = self.dispatch.sent, self.dispatch.received
        sent, received = ways if to_experts else ways[::-1]
        assert not self._under_way
        for tensor in tensors:
            if self.dispatch.group.size() == 1:
                self._under_way.append((tensor, tensor, None))
                continue
            given, arriving = tensor.contiguous(), tensor.new_empty(sum(received), *tensor.shape[1:])
            group = self.dispatch.group
            work = dist.all_to_all_single(arriving, given, received, sent, group=group, async_op=True)
            self._under_way.append((arriving, given, work))

    def finish(self) -> list[torch.Tensor]:
        """Wait for the rows that :meth:`start` began to send."""
        under_way, self._under_way = self._under_way, []
        for *_, work in under_way:
            if work is not None:
                work.wait()
        return [arrived for arrived, *_ in under_way]

    def keep(self, hidden_NH: torch.Tensor) -> None:
        """Keep the rows that go to experts, to send them again."""
        self._read_NH = hidden_NH.detach() if self.again else None

    def arrived(self, rows_PH: torch.Tensor) -> None:
        """Take note of what experts read, which is forgotten when they are done."""
        if self.again:
            # .data: autograd counts changes of saved tensors, and what is forgotten comes back as it was.
            self._rows = rows_PH.data, rows_PH.untyped_storage().nbytes()

    def forget(self) -> None:
        """Free the memory of what experts read."""
        if self._rows is not None:
            self._rows[0].untyped_storage().resize_(0)

    def rows_again(self) -> list[torch.Tensor]:
        """Rows that experts need again; none where these were kept."""
        read_NH, self._read_NH = self._read_NH, None
        return [] if read_NH is None else [self.dispatch.spread(read_NH)]

    def restore(self, arrived: Sequence[torch.Tensor]) -> None:
        """Put the rows that came again where they were."""
        for rows in arrived:
            assert self._rows is not None
            (kept, size), self._rows = self._rows, None
            kept.untyped_storage().resize_(size)
            self.dispatch.by_expert(rows, out=kept)


class _LaunchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: torch.Tensor, probs_NE: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.shape, way = exchange, probs_NE.shape, exchange.dispatch
        exchange.keep(hidden_NH)
        leaving = [hidden_NH, probs_NE.gather(1, way.expert_NK.long())]
        if not way.has_arrived:
            leaving.append(way.expert_NK)
        exchange.start([way.spread(each) for each in leaving], to_experts=True)
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
    def forward(ctx: Any, token: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange, way = exchange, exchange.dispatch
        rows_RH, probs_RK, *expert_RK = exchange.finish()
        if expert_RK:
            way.arrive(*expert_RK)
        rows_PH = way.by_expert(rows_RH)
        exchange.arrived(rows_PH)
        return rows_PH, way.factors(probs_RK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_PH: torch.Tensor, d_probs_P: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        way = ctx.exchange.dispatch
        ctx.exchange.start((way.by_row(d_PH.contiguous()), way.factors_by_row(d_probs_P)), to_experts=False)
        return graph_token(d_PH.device), None


class _LaunchOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output_PH: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.start((exchange.dispatch.by_row(output_PH.contiguous()),), to_experts=False)
        if ctx.needs_input_grad[0]:
            exchange.forget()
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
        exchange.start([exchange.dispatch.spread(d_NH), *exchange.rows_again()], to_experts=True)
        return graph_token(d_NH.device), None
