"""Bytes that the experts of a layer take on one rank, for each of its home rows; needs no torch.

Rows are counted as if every expert got equally many: then a rank gets as many pairs of a row and an expert as it sends.
Sizes follow what autograd saves in ``megatron_patches.experts`` and in Megatron-Core's sequential experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.models.experts import Experts

_WAY = 5 * 8
"""Bytes of where a pair lies, by row, by expert and in the order in which it came, in 64-bit numbers."""

_INSIDE = 3
"""Widths inside an expert: both projections, and what the last product reads."""

_PROBABILITY = 4
"""Bytes of a pair's probability, and of its gradient."""

_CHOICE = 8
"""Bytes of which expert it is, which the router keeps."""


@dataclass(frozen=True)
class ExpertBytes:
    """Experts of a layer.

    Attributes:
        experts: what they are; none of a dense layer.
        hidden: width of the residual stream.
        tp: tensor-parallel ranks, which share the rows.
        value: bytes of a weight or activation.
    """

    experts: Experts
    hidden: int
    tp: int
    value: int

    @property
    def pairs(self) -> float:
        """Pairs of a row and an expert on this rank, for each of its home rows; 0 in dense layers."""
        return self.experts.topk / self.tp if self.experts.count else 0.0

    def kept(self) -> int:
        """Bytes until backward: what experts read, and inside them what SwiGLU and the last product read."""
        return self.again() + self.way()

    def way(self) -> int:
        """Bytes until backward of where rows went, which are kept in any case."""
        return int(self.pairs * _WAY)

    def again(self) -> int:
        """Bytes of what is there once more in backward where experts are computed again."""
        inside = self.pairs * (self.value * (self.hidden + _INSIDE * self.experts.ffn) + _CHOICE + _PROBABILITY)
        # The shared expert's input is the router's, and that of its SwiGLU is counted with dense MLPs.
        return int(inside + self._scores()) + self.input() + self.value * self.experts.shared_ffn // self.tp

    def kept_when_recomputed(self) -> int:
        """Bytes until backward where experts alone are computed again: the row that the router reads, where it went
        and the probabilities."""
        return self.input() + self.way() + int(self.pairs * _PROBABILITY)

    def _scores(self) -> float:
        """Scores of the router in float32; with a balancing loss also those that it goes by."""
        experts = self.experts
        return 4 * experts.count * (1 + bool(experts.balance or experts.document_balance)) / self.tp

    def input(self) -> int:
        """The row that the router reads."""
        return self.value * self.hidden // self.tp if self.experts.count else 0

    def at_work(self, ep: int, beside: bool, again: bool) -> int:
        """Bytes in the experts' backward: gradients of what they put out and of what they read, on both sides of the
        exchange; or where experts are wide, inside them, where all of a rank are computed together.

        Args:
            ep: expert-parallel ranks, without others of which nothing is exchanged.
            beside: the other half's rows travel meanwhile.
            again: rows travel once more, as experts are computed again.
        """
        hidden, ffn = self.hidden, self.experts.ffn
        both_sides = 1 + (ep > 1)
        travelling = (1 + again) * both_sides if beside else 0
        inside = 2 * hidden + ffn if again else hidden + 2 * ffn
        elements = travelling * hidden + max((1 + both_sides) * hidden, inside)
        return int(self.pairs * (self.value * elements + _PROBABILITY))
