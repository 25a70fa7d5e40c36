"""The layers of a hybrid stack, as data: attention, recurrent layers and MLPs by a pattern; needs no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise

from distca.plan.recurrence import Recurrence

ATTENTION, DELTA_NET, MAMBA, MLP, EXPERTS = "*", "G", "M", "-", "E"
RECURRENT = DELTA_NET + MAMBA
_MIXERS = ATTENTION + RECURRENT
CONVOLUTION = 4
"""Rows that the convolution of a recurrent layer reads."""
_ALL = _MIXERS + MLP + EXPERTS


@dataclass(frozen=True)
class UnitSymbols:
    """A mixer and what follows it.

    Attributes:
        mixer: its symbol.
        mlp: the symbol of what follows; empty for nothing.
    """

    mixer: str
    mlp: str


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Recurrent layers beside attention, in the stack of Megatron-Core's HybridModel: each layer is a mixer or an MLP.

    Attributes:
        pattern: a symbol for each layer, repeated over the layers: * attention, G gated delta net, M Mamba-2, - MLP, E
            experts (Qwen3.5 is G-G-G-*-). Empty for a stack without recurrent layers.
        key_heads: key and query heads of recurrent layers; with Mamba-2 its groups.
        value_heads: value heads of recurrent layers, a multiple of key_heads.
        key_dim: width of a key head; with Mamba-2 the size of its state.
        value_dim: width of a value head.
        output_gate: the output of attention is multiplied by the sigmoid of a gate.
        rotate: queries and keys of attention are rotated by their positions.
        plain_norm: the norm of a gated delta net's heads multiplies by its weight, whatever other norms do (Qwen3.5).
        step_min: smallest step size of Mamba-2 (Nemotron-H).
    """

    pattern: str = ""
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 128
    value_dim: int = 128
    output_gate: bool = False
    rotate: bool = True
    plain_norm: bool = False
    step_min: float = 0.0

    def symbols(self, layers: int) -> str:
        """One symbol for each layer."""
        return (self.pattern * -(-layers // len(self.pattern)))[:layers] if self.pattern else ""

    def of_stages(self, layers: int, stages: int) -> str:
        """Megatron's pattern of all layers, with a | between pipeline stages."""
        symbols = self.symbols(layers)
        size = layers // stages
        return "|".join(symbols[begin : begin + size] for begin in range(0, len(symbols), size))

    def units(self, layers: int) -> list[UnitSymbols]:
        """Returns the mixers with what follows them."""
        symbols = [*self.symbols(layers), ATTENTION]
        pairs = pairwise(symbols)
        return [UnitSymbols(one, "" if after in _MIXERS else after) for one, after in pairs if one in _MIXERS]

    def mixers(self, layers: int) -> list[int]:
        """Returns for each layer the number of the mixer that it is, or that it follows."""
        return [mixer - 1 for mixer in accumulate(symbol in _MIXERS for symbol in self.symbols(layers))]

    @property
    def keys(self) -> int:
        """Width of all keys, or of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    def convolved(self, mixer: str) -> tuple[int, ...]:
        """Channels of the convolution by what they become: queries, keys and values of a gated delta net; x, B and C of
        Mamba-2."""
        keys, values = self.keys, self.values
        return (keys, keys, values) if mixer == DELTA_NET else (values, keys, keys)

    def projected(self, mixer: str) -> tuple[int, ...]:
        """Rows of a recurrent layer's first projection by what they become: of a gated delta net what is convolved, the
        output gate, β and α; of Mamba-2 the output gate, what is convolved, and step sizes."""
        heads = (self.value_heads,)
        if mixer == DELTA_NET:
            return (*self.convolved(mixer), self.values, *heads, *heads)
        return (self.values, *self.convolved(mixer), *heads)

    def weights(self, mixer: str, hidden: int) -> int:
        """Weights of a recurrent layer's two projections."""
        return hidden * (sum(self.projected(mixer)) + self.values)

    def recurrence(self, mixer: str, tp: int = 1) -> Recurrence:
        """Returns what the core of a recurrent layer computes, for the heads of one of ``tp`` tensor-parallel ranks."""
        heads = self.key_heads // tp, self.value_heads // tp
        if mixer == MAMBA:
            return Recurrence.mamba2(*heads, self.key_dim, self.value_dim)
        return Recurrence.gated_delta_net(*heads, self.key_dim, self.value_dim)

    def problems(self, layers: int) -> list[str]:
        """Sentences on what cannot work in a model of so many layers, each beginning with the field's name."""
        if not self.pattern:
            unset = asdict(Hybrid())
            return [
                f"{name} is {str(value).lower()}, but pattern is empty, for a model without recurrent layers; leave "
                f"{name} out, or give a pattern."
                for name, value in asdict(self).items()
                if value != unset[name]
            ]
        wrong = self._of_pattern(layers)
        return wrong or self._of_widths()

    def _of_pattern(self, layers: int) -> list[str]:
        said = f"pattern is {self.pattern!r}"
        if strange := [symbol for symbol in self.pattern if symbol not in _ALL]:
            return [f"{said}, with {strange[0]!r}, which is not served; take {' '.join(_ALL)}."]
        if layers % len(self.pattern):
            return [f"{said}, of {len(self.pattern)} layers, of which the {layers} layers are no multiple; change one."]
        if ATTENTION not in self.pattern:
            return [f"{said}, without attention; some layers must have it: add *."]
        if DELTA_NET in self.pattern and MAMBA in self.pattern:
            return [f"{said}, with G and M, which would share their widths; take one of them."]
        if self.pattern[0] not in _MIXERS or any(not {*pair} & {*_MIXERS} for pair in pairwise(self.pattern)):
            return [f"{said}, but each MLP or layer with experts follows a mixer (* G M); change it."]
        return []

    def _of_widths(self) -> list[str]:
        found = [
            f"{name} is {value}, but pattern {self.pattern!r} has no {symbol}, which alone has it; leave it out."
            for name, value, symbol in (
                ("plain_norm", str(self.plain_norm).lower(), DELTA_NET),
                ("step_min", f"{self.step_min:g}", MAMBA),
            )
            if getattr(self, name) and symbol not in self.pattern
        ]
        if not (math.isfinite(self.step_min) and self.step_min >= 0):
            found.append(f"step_min is {self.step_min:g}; it must be a number from 0 on.")
        if not {*RECURRENT} & {*self.pattern}:
            return found
        found += [
            f"{name} is {getattr(self, name)}, but pattern has recurrent layers; set it to 1 or more."
            for name in ("key_heads", "value_heads", "key_dim", "value_dim")
            if getattr(self, name) < 1
        ]
        if not found and self.value_heads % self.key_heads:
            found.append(f"value_heads is {self.value_heads}, no multiple of key_heads {self.key_heads}; change one.")
        return found


def shortest(symbols: str) -> str:
    """The shortest pattern that makes these symbols when it is repeated."""
    sizes = (size for size in range(1, len(symbols)) if len(symbols) % size == 0)
    return next((symbols[:size] for size in sizes if symbols[:size] * (len(symbols) // size) == symbols), symbols)
