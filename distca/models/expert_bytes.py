"""Bytes that the experts of a layer take on one rank, for each of its home rows; needs no torch.

Rows are counted as if every expert got equally many: then a rank gets as many pairs of a row and an expert as it sends.
Sizes follow what autograd saves in ``megatron_patches.experts`` and in Megatron-Core's sequential experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.models.experts import Experts

_WAY = 3 * 8 + 4
"""Bytes of where a pair lies: by row and by expert in 64-bit numbers, and the number of its expert."""

_INSIDE = 3
"""Widths inside an expert: both projections, and what the last product reads."""

_NUMBER = 8 + 4
"""Bytes by which a pair finds its expert's bias: its own number and the expert's."""

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
        """Bytes in the experts' backward, at the larger of two moments.

        One is an exchange: gradients of outputs or inputs are there by pair and by row that travels. The other is
        inside the experts, whose gradients take more where they are wide: all of a rank are computed together.

        Args:
            ep: expert-parallel ranks; one exchanges nothing.
            beside: whether the other nano-batch's rows travel meanwhile.
            again: whether experts are computed again, so that rows travel once more.
        """
        hidden, ffn = self.hidden, self.experts.ffn
        arriving = ep * self.experts.copies_at_each(ep) / self.tp if self.experts.count else 0.0
        # What is sent and what arrives; one rank sends its rows nowhere.
        travelling = 2 * arriving * (1 + again) if beside and ep > 1 else 0.0
        # Inside, a product's input makes room for the gradient of what comes before it.
        inside = self.pairs * (2 * hidden + ffn if again else max(hidden + ffn, 2 * ffn))
        inside *= self.value
        if self.experts.biases and not again:  # the bias of each row's expert beside the output, and its number
            inside = max(inside, self.pairs * (2 * self.value * hidden + _NUMBER + _PROBABILITY))
        exchanged = self.value * hidden * (self.pairs + (1 + (ep > 1)) * arriving) + self.pairs * _PROBABILITY
        return int(self.value * travelling * hidden + max(exchanged, inside))
