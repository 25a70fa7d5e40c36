"""How rotary positions are stretched beyond the context that a model was first trained with; needs no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

_TAKEN = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""Fields that have an effect, by kind."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """The scaling of rotary positions, for contexts longer than the first ones.

    Attributes:
        kind: none; linear = all frequencies divided by factor; dynamic = a larger base for documents longer than
            original_length, by each document's own length; llama3 = low frequencies divided by factor (LLaMA 3.1);
            yarn = low frequencies divided by factor and attention scores sharpened.
        factor: how many times longer contexts become.
        original_length: positions of the model's first training; needed by dynamic, llama3 and yarn.
        low_freq_factor: of llama3; frequencies that turn fewer times over original_length are divided.
        high_freq_factor: of llama3; frequencies that turn more often over original_length stay.
        beta_fast: of yarn; frequencies that turn more often over original_length stay.
        beta_slow: of yarn; frequencies that turn fewer times over original_length are divided.
        attention_factor: of yarn, on queries and on keys; null takes 0.1 ln(factor) + 1.
        truncate: of yarn; the frequencies in between are bounded by whole numbers.
    """

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def resolved_attention_factor(self) -> float:
        """Factor on queries and on keys; 1 for all kinds but yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is None:
            return yarn_magnitude(self.factor)
        return self.attention_factor

    def problems(self) -> list[str]:
        """What cannot work, in words, each beginning with the field's name; empty where all is well."""
        found: list[str] = []
        if self.kind == "none":
            return found
        if self.factor < 1:
            found.append(f"factor is {self.factor:g}; it must be at least 1.")
        if self.kind != "linear" and self.original_length < 1:
            found.append(
                f"original_length is {self.original_length}, but kind {self.kind} needs the positions of the model's "
                "first training; set it."
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            found.append(
                f"low_freq_factor is {self.low_freq_factor:g}; it must be above 0 and below high_freq_factor "
                f"{self.high_freq_factor:g}."
            )
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            found.append(
                f"beta_slow is {self.beta_slow:g}; it must be above 0 and not above beta_fast {self.beta_fast:g}."
            )
        return found

    def unused(self, first: RopeScaling) -> list[str]:
        """What was set and does nothing, in words, each beginning with the field's name.

        Args:
            first: what was there before anything was set; the defaults, or what a folder brought.
        """
        default = RopeScaling()
        found = [
            f"{name} is {_shown(value)}, but kind is {self.kind}, which has none; set kind, or leave {name} out."
            for name, value in asdict(self).items()
            if name not in ("kind", *_TAKEN[self.kind]) and value not in (getattr(default, name), getattr(first, name))
        ]
        if self._is_idle() and (self.kind, self.factor) != (first.kind, first.factor):
            found.append(f"factor is 1, with which kind {self.kind} stretches nothing; raise it, or set kind to none.")
        return found

    def _is_idle(self) -> bool:
        """Whether positions turn as without; dynamic goes by the length of a document too."""
        return self.kind not in ("none", "dynamic") and self.factor == 1 and self.resolved_attention_factor == 1


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on queries and keys of contexts that are ``factor`` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
