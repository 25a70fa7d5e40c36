"""How rotary positions are stretched beyond the context that a model was first trained with; needs no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

_TAKEN = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("factor", "original_length", "attention_factor", "short_factors", "long_factors"),
}
"""Fields that have an effect, by kind."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """The scaling of rotary positions, for contexts longer than the first ones.

    Attributes:
        kind: linear = all frequencies divided by factor; dynamic = a larger base for documents longer than
            original_length; llama3 = low frequencies divided (LLaMA 3.1); yarn = the same, scores sharpened; longrope =
            a divisor for each frequency (Phi-4-mini). dynamic and longrope go by each document's own length.
        factor: how many times longer contexts become.
        original_length: positions of the model's first training; needed by all kinds but linear.
        low_freq_factor: llama3: frequencies with fewer turns over original_length are divided.
        high_freq_factor: llama3: frequencies with more turns over original_length stay.
        beta_fast: yarn: frequencies with more turns over original_length stay.
        beta_slow: yarn: frequencies with fewer turns over original_length are divided.
        attention_factor: yarn and longrope: factor on queries and on keys; null takes 0.1 ln(factor) + 1 with yarn, and
            the root of 1 + ln(factor) / ln(original_length) with longrope.
        truncate: yarn: the frequencies in between are bounded by whole numbers.
        short_factors: longrope: a divisor for each frequency in documents of up to original_length.
        long_factors: longrope: the same in longer documents.
    """

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: list[float] = field(default_factory=list)
    long_factors: list[float] = field(default_factory=list)

    @property
    def by_length(self) -> bool:
        """Whether frequencies go by the length of each document."""
        return self.kind in ("dynamic", "longrope")

    @property
    def resolved_attention_factor(self) -> float:
        """Factor on queries and on keys; 1 for all kinds but yarn and longrope."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return yarn_magnitude(self.factor)
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))

    def problems(self) -> list[str]:
        """Returns a sentence for each setting that cannot work, beginning with the field's name; empty where all is
        well."""
        found: list[str] = []
        if self.kind == "none":
            return found
        if not 1 <= self.factor < math.inf:
            found.append(f"factor is {self.factor:g}; it must be a number of at least 1.")
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            found.append(f"attention_factor is {self.attention_factor:g}; it must be a number above 0.")
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
        if self.kind == "longrope":
            found += self._problems_of_factors()
        return found

    def _problems_of_factors(self) -> list[str]:
        found = []
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if not factors or not all(0 < each < math.inf for each in factors):
                found.append(f"{name} is {factors}; it must have a number above 0 for each frequency.")
        if len(self.short_factors) != len(self.long_factors):
            found.append(
                f"short_factors has {len(self.short_factors)} numbers and long_factors {len(self.long_factors)}; both "
                "must have one for each frequency."
            )
        if self.original_length == 1 and self.attention_factor is None:
            found.append("original_length is 1, with which longrope has no attention factor; set attention_factor.")
        return found

    def frequencies_problem(self, rotated: int) -> str | None:
        """Returns a sentence on what cannot work with so many frequencies, beginning with a field's name; else None.

        Args:
            rotated: dimensions of a head that positions turn, two for each frequency.
        """
        if self.kind == "dynamic" and rotated == 2:
            return "kind is dynamic, but positions turn 2 elements of a head, and its base needs at least 4."
        if self.kind != "longrope" or len(self.short_factors) == rotated // 2:
            return None
        return f"short_factors has {len(self.short_factors)} numbers, but a head has {rotated // 2} frequencies."

    def unused(self, first: RopeScaling) -> list[str]:
        """Returns a sentence for each setting that was set and does nothing, beginning with the field's name.

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
        """Whether positions turn as without; some kinds go by the length of a document too."""
        return self.kind != "none" and not self.by_length and self.factor == 1 and self.resolved_attention_factor == 1


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on queries and keys of contexts that are ``factor`` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
