"""Bytes that the experts of a layer take on one rank, for each of its home rows; needs no torch.

Rows are counted as if every expert got equally many: then a rank gets as many pairs of a row and an expert as it sends.
Sizes follow what autograd saves in ``megatron_patches.experts`` and in Megatron-Core's sequential experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.models.experts import Experts

_INDICES = 7 * 8
"""Bytes of where a pair lies, by row, by expert and in the order in which it came, in 64-bit numbers."""

_CLAMPED = 8
"""Widths inside an expert whose activation is clamped: both projections with their biases, the clamped gate, its
sigmoid, their product, the clamped up projection, and what is put out before and behind its score."""

_PROBABILITIES = 9
"""Bytes at work for the score of a pair, its gradient and where they belong."""


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
        widths = _CLAMPED if self.experts.clamp else 3
        inside = self.pairs * (self.value * (self.hidden + widths * self.experts.ffn) + _INDICES)
        # The shared expert's input is the router's, and that of its SwiGLU is counted with dense MLPs.
        return int(inside + self._scores()) + self.input() + self.value * self.experts.shared_ffn // self.tp

    def _scores(self) -> float:
        """Scores of the router in float32; with a balancing loss also those that it goes by."""
        experts = self.experts
        return 4 * experts.count * (1 + bool(experts.balance or experts.document_balance)) / self.tp

    def input(self) -> int:
        """The row that the router reads, which is all that is kept where experts are computed again."""
        return self.value * self.hidden // self.tp if self.experts.count else 0

    def at_work(self) -> int:
        """Bytes in the experts' backward: gradients of what they put out and of what they read, on both sides of the
        exchange; or where experts are wide, inside them, where all of a rank are computed together."""
        hidden, ffn = self.hidden, self.experts.ffn
        return int(self.pairs * (self.value * max(3 * hidden, hidden + 3 * ffn) + _PROBABILITIES))
