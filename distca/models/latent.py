"""Multi-head latent attention, as data; needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from distca.models.rope import RopeScaling


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are expanded from narrow rows, and heads share
    the part of keys that positions turn.

    Attributes:
        kv_rank: width of the rows that keys and values are expanded from; 0 for other attention.
        q_rank: the same of queries; 0 projects them from the residual stream.
        key_dim: width of a head of queries and keys that positions leave as it is.
        rotary_dim: width behind it that positions turn.
        value_dim: width of a value head, at most key_dim + rotary_dim.
        score_magnitude: weight of YaRN's magnitude, whose square multiplies scores (mscale_all_dim); 0 for none.
        norm_epsilon: epsilon of the norms of latent rows; 0 takes that of all norms.
    """

    kv_rank: int = 0
    q_rank: int = 0
    key_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128
    score_magnitude: float = 0.0
    norm_epsilon: float = 0.0

    @property
    def head_dim(self) -> int:
        """Width of a head of queries and keys."""
        return self.key_dim + self.rotary_dim

    def inner_weights(self, hidden: int, heads: int) -> int:
        """Weights of the products before core attention."""
        queries = (self.q_rank or hidden) * heads * self.head_dim
        return self.replicated_weights(hidden) + queries + self.kv_rank * heads * (self.key_dim + self.value_dim)

    def replicated_weights(self, hidden: int) -> int:
        """Weights among these that every tensor-parallel rank has: of the projections to latent rows."""
        return hidden * (self.q_rank + self.kv_rank + self.rotary_dim) if self.kv_rank else 0

    def norm_weights(self) -> int:
        """Weights of the norms of latent rows."""
        return self.q_rank + self.kv_rank

    def problems(self) -> list[str]:
        """Sentences on what cannot work, each beginning with the field's name."""
        if not self.kv_rank:
            unset = asdict(Latent())
            return [
                f"{name} is {value:g}, but kv_rank is 0, for attention without latent rows; leave {name} out, or set "
                "kv_rank."
                for name, value in asdict(self).items()
                if value != unset[name]
            ]
        found = [
            f"{name} is {getattr(self, name)}; it must be at least 1."
            for name in ("key_dim", "rotary_dim", "value_dim")
            if getattr(self, name) < 1
        ]
        if self.rotary_dim % 2:
            found.append(f"rotary_dim is {self.rotary_dim}, but rotary positions need an even one.")
        if self.value_dim > self.head_dim:
            found.append(
                f"value_dim is {self.value_dim}, but a key has {self.head_dim} (key_dim + rotary_dim), and values must "
                "not be wider; lower it."
            )
        return found

    def scaling_problem(self, scaling: RopeScaling) -> str | None:
        """Returns a sentence on an attention factor that would have no effect, beginning with its field's name; else
        None."""
        factor = scaling.resolved_attention_factor
        if not self.kv_rank or scaling.kind != "yarn" or scaling.factor != 1 or factor == 1:
            return None
        return (
            f"attention_factor is {factor:g}, but factor is 1, with which latent attention multiplies queries and keys "
            "by 1; leave attention_factor out, or raise factor."
        )
