"""The results of a model in one step of a case, and how far two such outcomes are apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distca.testing.reference_attention import relative_error


@dataclass(frozen=True)
class Outcome:
    """The results of a model in one step of a case.

    Attributes:
        loss: mean loss over target tokens.
        gradients: full gradient of every parameter, float64 on the CPU.
    """

    loss: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """How far a candidate is from the reference: relative norms, infinite for what is no number.

    Attributes:
        loss: of the loss.
        gradient: of the parameter that differs most.
        parameter: its name.
    """

    loss: float
    gradient: float
    parameter: str


def difference(candidate: Outcome, reference: Outcome) -> Difference:
    """Compare loss and every parameter's gradient."""
    errors = {
        name: relative_error(candidate.gradients[name], expected) for name, expected in reference.gradients.items()
    }
    worst = max(errors, key=errors.__getitem__)
    losses = (torch.tensor(each.loss, dtype=torch.float64) for each in (candidate, reference))
    return Difference(relative_error(*losses), errors[worst], worst)
