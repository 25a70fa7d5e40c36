"""The MLP behind a layer's attention, and how many weights it has; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from distca.models.experts import Experts


@dataclass(frozen=True)
class Mlp:
    """A dense MLP, and experts.

    Attributes:
        ffn: width inside it, of its up projection, and of its gate where it has one; beside experts that of the shared
            one.
        gated: it has a gate; experts always have.
        experts: the experts; in most layers none.
    """

    ffn: int
    gated: bool = True
    experts: Experts = field(default_factory=Experts)

    @property
    def projected(self) -> int:
        """Width of its first product's output: gate, where it has one, and up."""
        return (1 + self.gated) * self.ffn

    def weights(self, hidden: int) -> int:
        """Weights that every token is multiplied by, of experts only its own."""
        return self.dense(hidden) + self.router(hidden) + self.routed(hidden)

    def held(self, hidden: int) -> int:
        """Weights of all experts and of all that is beside them."""
        return self.dense(hidden) + self.router(hidden) + self.all_experts(hidden)

    def dense(self, hidden: int) -> int:
        """Weights of gate, up and down, of which each tensor-parallel rank has a share."""
        return hidden * (self.projected + self.ffn)

    def router(self, hidden: int) -> int:
        """Weights of the router and of the shared expert's gate, which every rank has all of."""
        return hidden * (self.experts.count + self.experts.shared_gate)

    def routed(self, hidden: int) -> int:
        """Weights of the experts that a token goes to."""
        return self.experts.topk * _gated(hidden, self.experts.ffn)

    def all_experts(self, hidden: int) -> int:
        """Weights of all experts but the shared one, of which each expert-parallel rank has a share."""
        return self.experts.count * _gated(hidden, self.experts.ffn)


def _gated(hidden: int, ffn: int) -> int:
    return 3 * hidden * ffn
