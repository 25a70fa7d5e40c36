"""The ways to train that are compared, by name: a method and the ranks of a context-parallel group."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from distca.errors import BaselineError
from distca.plan import AttentionKind

Method = Literal[
    "distca",
    "distca-unsplit",
    "packed",
    "packed-dealt",
    "variable",
    "cp",
    "cp-keep",
    "cp-halo",
    "ring",
    "ulysses",
    "megatron-te",
    "megatron-te-p2p",
    "megatron-te-a2a",
]
_GROUPED = ("cp", "cp-keep", "cp-halo", "ring", "ulysses", "megatron-te-p2p", "megatron-te-a2a")
PEERS = ("megatron-te", "megatron-te-p2p", "megatron-te-a2a")
"""Methods that are unmodified Megatron-Core with Transformer Engine's layers, and nothing of this project."""
RINGS: tuple[Method, ...] = ("ring", "megatron-te-p2p")
"""Methods in which keys and values go from rank to rank of a group."""
BY_HEADS: tuple[Method, ...] = ("ulysses", "megatron-te-a2a")
"""Methods in which every rank of a group computes all rows of some heads."""


@dataclass(frozen=True)
class Mode:
    """A method and its degree.

    Methods:
        distca: core attention disaggregation.
        distca-unsplit: the same without ping-pong: micro-batches are not cut into nano-batches, and ranks wait for
            transfers.
        packed: whole documents, equal tokens per rank, plain data parallelism.
        packed-dealt: the same, documents dealt over a step's micro-batches and ranks anew for equal work of ranks.
        variable: whole documents, unequal tokens per rank so that every rank has the same work.
        cp: every document cut into head–tail pieces over the group, keys and values all-gathered, again in backward.
        cp-keep: the same with gathered keys and values kept for backward: more memory, one all-gather less.
        cp-halo: the same in layers without a window; in others, ranks exchange the rows before each piece that its
            queries see.
        ring: the group's documents as one sequence, cut zigzag; keys and values travel in a ring.
        ulysses: the group's documents as one sequence; attention is sharded by heads through all-to-alls. Recurrent
            layers run by fla's context parallelism, in groups of two.
        megatron-te: unmodified Megatron-Core with Transformer Engine's layers, whole documents.
        megatron-te-p2p: the same with its context parallelism, in which keys and values travel in a ring.
        megatron-te-a2a: the same with all-to-alls of heads.

    Attributes:
        method: one of these.
        degree: ranks of a context-parallel group; 1 for methods without one.
    """

    method: Method
    degree: int = 1

    @property
    def name(self) -> str:
        """Such as "packed", "cp4", "cp4-keep", "megatron-te4-p2p"."""
        if self.method not in _GROUPED:
            return self.method
        head, dash, tail = self.method.rpartition("-")
        return f"{head}{self.degree}-{tail}" if dash else f"{tail}{self.degree}"

    @property
    def disaggregated(self) -> bool:
        """Whether it is DistCA, with or without ping-pong."""
        return self.method in ("distca", "distca-unsplit")

    @property
    def unsplit(self) -> bool:
        """Whether it is DistCA without ping-pong, whatever is set."""
        return self.method == "distca-unsplit"

    @property
    def peer(self) -> bool:
        """Whether it is another's program: unmodified Megatron-Core with Transformer Engine."""
        return self.method in PEERS

    def check(
        self,
        ranks: int,
        kv_heads: int,
        kinds: Sequence[AttentionKind] = (),
        key_heads: int = 0,
        narrow_values: bool = False,
    ) -> None:
        """Refuse a mode that the run's ranks, heads or kinds of layers rule out.

        Args:
            ranks: data-parallel ranks.
            kv_heads: key/value heads of each.
            kinds: the kinds of the model's attention layers; empty checks none.
            key_heads: key heads of recurrent layers on each rank; 0 for a model without such layers.
            narrow_values: whether values are narrower than keys.

        Raises:
            BaselineError: the mode cannot run.
        """
        if ranks % self.degree:
            raise BaselineError(
                f"{self.name} needs groups of {self.degree} ranks, which do not divide the {ranks} data-parallel "
                f"rank{'s' if ranks > 1 else ''}; choose another degree or another number of ranks."
            )
        if self.method in BY_HEADS and kv_heads % self.degree:
            raise BaselineError(
                f"{self.name} shards {kv_heads} key/value head{'s' if kv_heads > 1 else ''} over {self.degree} ranks, "
                "which does not divide them; choose a degree that does, or a smaller tensor-parallel size."
            )
        other = next((kind.name for kind in kinds if kind.window or kind.sink or kind.softcap), None)
        if self.method in ("ring", "ulysses") and other:
            raise BaselineError(
                f"{self.name} takes models of full layers only, and this one has others ({other}); choose packed, cp, "
                "cp-keep, cp-halo or distca."
            )
        if narrow_values and self.method in ("ring", "ulysses"):
            raise BaselineError(
                f"{self.name} takes values as wide as keys, and this model's are narrower; choose packed, cp, cp-keep "
                "or distca."
            )
        if key_heads and self.method in ("ring", "cp-halo", "ulysses") and self.name != "ulysses2":
            raise BaselineError(
                f"{self.name} takes models without recurrent layers, and this one has some; choose packed, cp, "
                "cp-keep, ulysses2 or distca."
            )
        if key_heads % self.degree and self.method != "ulysses":
            raise BaselineError(
                f"{self.name} shards {key_heads} key heads of recurrent layers over {self.degree} ranks, which does "
                "not divide them; choose a degree that does."
            )


def parse_mode(name: str) -> Mode:
    """The mode of a name.

    Raises:
        BaselineError: there is none.
    """
    match = re.fullmatch(r"([a-z-]+?)(\d*)(-keep|-halo|-dealt|-p2p|-a2a)?", name)
    method = f"{match[1]}{match[3] or ''}" if match else name
    if match is None or method not in get_args(Method) or bool(match[2]) != (method in _GROUPED):
        raise BaselineError(
            f"There is no mode {name!r}; choose among distca, distca-unsplit, packed, packed-dealt, variable, "
            "megatron-te, and with a number of ranks of 2 or more cp, cp-keep, cp-halo, ring, ulysses, megatron-te-p2p "
            "and megatron-te-a2a, such as cp4, cp4-keep, ring4, ulysses4, megatron-te4-p2p."
        )
    degree = int(match[2] or 1)
    if method in _GROUPED and degree < 2:
        raise BaselineError(
            f"{name} has groups of {degree} rank{'' if degree == 1 else 's'}; context parallelism begins with 2. "
            "Without it: packed."
        )
    return Mode(method, degree)  # type: ignore[arg-type]


def every_mode(ranks: int, windows: bool = False) -> list[Mode]:
    """Every mode of this project with groups that divide ``ranks`` data-parallel ranks: DistCA first, and last what
    needs the most memory. "cp-halo" is among them only with ``windows``, as it is "cp-keep" without. "packed-dealt" and
    "distca-unsplit" run where they are named. Some may not pass :meth:`Mode.check`.
    """
    grouped: list[Method] = [each for each in get_args(Method) if each in _GROUPED and each not in PEERS]
    if not windows:
        grouped.remove("cp-halo")
    modes = [Mode("distca"), Mode("packed")]
    for degree in (size for size in range(2, ranks + 1) if ranks % size == 0):
        modes += [Mode(method, degree) for method in grouped]
    return [*modes, Mode("variable")]
