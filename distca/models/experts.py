"""The experts of a model's layers, as data; needs no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

_NEEDLESS = 1 / 8
"""The share of rows that may travel to a rank without an expert of theirs, so that all rows go to all ranks and hosts
know their numbers beforehand. It was not tuned: 2 ranks with 4 experts of a row are below it, 8 ranks with 8 above."""


def goes_everywhere(ranks: int, topk: int) -> bool:
    """Whether all rows go to all of so many expert-parallel ranks, where a row has ``topk`` experts."""
    return (1 - 1 / ranks) ** topk <= _NEEDLESS


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts in place of dense MLPs: a router sends every row to a few of many MLPs, and adds up their outputs.

    Attributes:
        count: experts of a layer; 0 for a dense model.
        topk: experts that each row goes to.
        ffn: width inside an expert.
        dense_layers: number of first layers that have a dense MLP instead.
        shared_ffn: width of an expert that all rows go to; 0 for none.
        shared_gate: the shared expert's output is multiplied by the sigmoid of a learned number.
        score: how the router's logits become scores.
        normalize: a row's scores add up to 1, or to scale where set; sigmoid needs it unless topk is 1.
        bias: experts are chosen by score plus a bias, which grows by bias_rate after a step with fewer rows than the
            mean, and shrinks otherwise. Needs score sigmoid.
        bias_rate: how much this bias changes in a step.
        groups: equal groups of experts, of which each row chooses some first; 0 for none.
        chosen_groups: number of groups that a row chooses, by the best topk / chosen_groups scores of each.
        scale: factor on the scores of a row's experts.
        balance: coefficient of the loss that balances experts over a micro-batch; 0 for none.
        document_balance: coefficient of the same loss over each document.
        z_loss: coefficient of the loss on the size of the router's logits; 0 for none.
        biases: the router, experts and attention's projections have biases.
        clamp: limit of an expert's gate g, from above, and of its up projection u, both ways; its output is then g ·
            sigmoid(1.702 g) · (u + 1) (gpt-oss). 0 for none.
    """

    count: int = 0
    topk: int = 2
    ffn: int = 0
    dense_layers: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    bias: bool = False
    bias_rate: float = 1e-3
    groups: int = 0
    chosen_groups: int = 0
    scale: float = 1.0
    balance: float = 0.0
    document_balance: float = 0.0
    z_loss: float = 0.0
    biases: bool = False
    clamp: float = 0.0

    def copies_at_each(self, ranks: int) -> float:
        """How often a row goes to a given one of so many expert-parallel ranks, on average: at most once."""
        return 1.0 if goes_everywhere(ranks, self.topk) else 1 - (1 - 1 / ranks) ** self.topk

    def problems(self, layers: int) -> list[str]:
        """Sentences on what cannot work in a model of so many layers, each beginning with the field's name."""
        if not self.count:
            return self._without_effect()
        return self._sizes(layers) + self._router() + self._groups() + self._inside()

    def _without_effect(self) -> list[str]:
        """Settings of experts in a dense model."""
        unset = asdict(Experts())
        return [
            f"{name} is {_said(value)}, but count is 0, and a dense model has none; set count to the experts of a "
            f"layer, or leave {name} out."
            for name, value in asdict(self).items()
            if value != unset[name]
        ]

    def _sizes(self, layers: int) -> list[str]:
        found = []
        if self.ffn < 1:
            found.append(f"ffn is {self.ffn}, but the model has experts; set it to their width, 1 or more.")
        if not 1 <= self.topk <= self.count:
            found.append(f"topk is {self.topk}; it must be at least 1 and at most count, which is {self.count}.")
        if self.dense_layers >= layers:
            found.append(
                f"dense_layers is {self.dense_layers}, but the model has {layers} layers, so none has experts; lower "
                "it, or set count to 0."
            )
        if self.shared_gate and not self.shared_ffn:
            found.append("shared_gate is true, but shared_ffn is 0; set the width of the shared expert, or no gate.")
        return found

    def _router(self) -> list[str]:
        found = []
        if not (math.isfinite(self.scale) and self.scale > 0):
            found.append(f"scale is {self.scale:g}; it must be a number above 0.")
        if self.score == "sigmoid" and not self.normalize and self.topk > 1:
            found.append("normalize is false, but scores of several sigmoids are always normalised; set it to true.")
        if self.normalize and self.topk == 1:
            found.append(
                "normalize is true, but topk is 1, whose score would always be 1, so that the router learns nothing; "
                "set normalize to false."
            )
        if self.bias and self.score != "sigmoid":
            found.append(f"bias is true, but score is {self.score}, which has none; set score to sigmoid, or no bias.")
        return found

    def _inside(self) -> list[str]:
        found = []
        if not (math.isfinite(self.clamp) and self.clamp >= 0):
            found.append(f"clamp is {self.clamp:g}; it must be a number from 0 on.")
        for name in ("shared_ffn", "dense_layers"):
            if (self.biases or self.clamp) and getattr(self, name):
                found.append(
                    f"{name} is {getattr(self, name)}, but with biases or clamp all layers have experts, and no shared "
                    "one; set it to 0."
                )
        return found

    def _groups(self) -> list[str]:
        groups, chosen = self.groups, self.chosen_groups
        if not groups and not chosen:
            return []
        if not 1 <= chosen <= groups:
            return [f"chosen_groups is {chosen} and groups is {groups}; give 1 to groups of them, or leave both out."]
        if self.count % groups:
            return [f"groups is {groups}, which does not divide count {self.count}; change one."]
        if self.topk % chosen or self.topk // chosen > self.count // groups:
            return [
                f"chosen_groups is {chosen}, but topk is {self.topk}: each of them gives the same number of experts, "
                f"at most the {self.count // groups} that it has; change one."
            ]
        return []


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
