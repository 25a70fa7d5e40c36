"""The names under which a family's folders hold the parts of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from distca.models.stored import BODY, piece_name


@dataclass(frozen=True, kw_only=True)
class ExpertMap:
    """Names of the tensors of a layer's experts, without the layer's prefix and without .weight.

    Attributes:
        router: which experts a row goes to.
        choice_bias: what is added to its scores before the choice; the whole name.
        shared_gate_up: gate and up projections of the shared expert.
        shared_down: its last projection.
        shared_gate: what its output is multiplied by the sigmoid of, where the family has it.
        experts: what the names of experts begin with, before their number.
        gate_up: an expert's gate and up projections, behind its number; a single name holds all rows of the gate, then
            those of up.
        down: its last projection, behind its number.
        stacked: the tensors of all experts of a layer lie in one, and have no number; biases end with _bias.
        input_first: the first dimension of an expert's projection is its input's, with gate and up in turn (gpt-oss).
    """

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    experts: str = "mlp.experts"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    stacked: bool = False
    input_first: bool = False

    def fused(self) -> ExpertMap:
        """The names with all experts of a layer in one tensor; the shared expert keeps its own."""
        shared = {name: getattr(self, name) for name in ("shared_gate_up", "shared_down", "shared_gate")}
        return replace(FUSED, **shared)

    def of(self, number: int, part: str, kind: str = "weight") -> str:
        """The name of the weight or of the bias of a part of an expert."""
        if self.stacked:
            return piece_name(f"{self.experts}.{part}{'' if kind == 'weight' else '_bias'}", number)
        return f"{self.experts}.{number}.{part}.{kind}"


FUSED = ExpertMap(gate_up=("gate_up_proj",), stacked=True)
"""The names of any family's experts as version 5 of transformers has them in memory. It writes them too, where it is
told to save no original format, and so does what saves its state by itself."""


@dataclass(frozen=True, kw_only=True)
class RecurrentMap:
    """Names of the tensors of a recurrent layer, without the layer's prefix.

    Attributes:
        place: what all of them begin with.
        projections: of the first one by name, without .weight, how many parts it holds of those that
            :meth:`distca.models.hybrid.Hybrid.projected` has, one behind the other.
        by_key_head: the parts of each key head lie together (Qwen3-Next).
    """

    place: str = "linear_attn"
    projections: tuple[tuple[str, int], ...] = ()
    by_key_head: bool = False

    def name(self, part: str) -> str:
        """The name of a tensor."""
        return f"{self.place}.{part}"


@dataclass(frozen=True, kw_only=True)
class LatentMap:
    """Names of the tensors of latent attention, without the layer's prefix and without .weight.

    Attributes:
        query: projection of queries, where they have no latent rows.
        query_down: projection to their latent rows.
        query_norm: norm of these.
        query_up: projection from these.
        down: projection to the latent rows of keys and values, and to the part of keys that heads share.
        norm: norm of these rows.
        up: projection from these.
    """

    query: str = "self_attn.q_proj"
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Names of a layer's tensors, without the layer's prefix and without .weight or .bias.

    Attributes:
        attention_norm: norm before attention, where the family has one.
        query_key_value: projections of q, k and v; a single name holds all rows of q, then those of k and of v.
        query_norm: norm of query heads, where the family has one.
        key_norm: norm of key heads, where the family has one.
        sinks: of query heads, where the family has them; the whole name.
        attention_output: projection behind attention.
        attention_post_norm: norm behind that, where the family has one.
        mlp_norm: norm before the MLP, where the family has one.
        gate_up: the MLP's gate and up projections; a single name holds all rows of the gate, then those of up. Up alone
            where the MLP has no gate.
        down: the MLP's last projection.
        mlp_post_norm: norm behind that, where the family has one.
        experts: what layers with experts have in place of the MLP.
        recurrent: what recurrent layers have in place of attention.
        own_mlps: MLPs are layers of their own, as in Megatron-Core's HybridModel (Nemotron-H); else each is in the
            layer of the mixer before it.
        embedding: of tokens; the whole name.
        final_norm: norm behind the last layer; the whole name.
        old_body: a word that names of tensors may begin with in place of model.
        latent: what latent attention has in place of projections of q, k and v.
    """

    attention_norm: str = "input_layernorm"
    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    attention_output: str = "self_attn.o_proj"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = "post_feedforward_layernorm"
    experts: ExpertMap = field(default_factory=ExpertMap)
    recurrent: RecurrentMap = field(default_factory=RecurrentMap)
    own_mlps: bool = False
    embedding: str = f"{BODY}.embed_tokens.weight"
    final_norm: str = f"{BODY}.norm.weight"
    old_body: str = ""
    latent: LatentMap = field(default_factory=LatentMap)

    def mixer_norms(self, norms: str) -> tuple[str, ...]:
        """The norms around attention, by where a layer's norms are."""
        return _placed(norms, self.attention_norm, self.attention_post_norm)

    def mlp_norms(self, norms: str, parallel_mlp: bool) -> tuple[str, ...]:
        """The norms around the MLP; with a parallel MLP attention's is the only one before both."""
        found = _placed(norms, self.mlp_norm, self.mlp_post_norm)
        return found[1:] if parallel_mlp else found


def _placed(norms: str, before: str, behind: str) -> tuple[str, ...]:
    return ((before,) if norms != "post" else ()) + ((behind,) if norms != "pre" else ())
