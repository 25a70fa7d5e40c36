"""Bytes of a layer on one rank: what it keeps of a token until its backward, and what it needs while it is at work.

The trainer predicts its stages with it from settings, the simulator its servers from plans. Which rows of q, k, v and o
are kept where is theirs to say. Sizes follow what autograd saves in megatron-core's local layers, and in FP8 what
Transformer Engine's linear layers do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from distca.device.sizes import LOGITS_BYTES
from distca.models.expert_bytes import ExpertBytes
from distca.models.hybrid import DELTA_NET
from distca.models.shape import LayerKind, ModelShape
from distca.sizes.fp8_shapes import Fp8

Recompute = Literal["none", "mlp", "all"]
_CHUNK_ROWS = 64  # of a chunk of fla-core's kernels


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """A layer, and how a rank runs it.

    Attributes:
        shape: of the model.
        kind: the layer's kind.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks.
        sequence_parallel: the residual stream is sharded over the tensor-parallel ranks.
        value: bytes of a weight or activation.
        fp8: how linear layers scale tensors to FP8.
        fp8_weights: their weights are held as FP8 numbers alone.
        keep_outputs: outputs of SwiGLU and of the norms before matrix products are kept.
        recompute: what is computed again in backward.
        disaggregated: core attention is; else it is at home, and recomputing all computes it again too.
        keep: attention servers keep q, k, v and o for the backward; else home ranks send them again.
    """

    shape: ModelShape
    kind: LayerKind
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    value: int = 2
    fp8: Fp8 = "none"
    fp8_weights: bool = False
    keep_outputs: bool = False
    recompute: Recompute = "none"
    disaggregated: bool = True
    keep: bool = True

    # Elements of a token on this rank.

    @cached_property
    def hidden(self) -> int:
        """The residual stream, which is whole without sequence parallelism."""
        return self.shape.hidden // self.tp if self.sequence_parallel else self.shape.hidden

    @cached_property
    def ffn(self) -> int:
        """Inside the MLP, of its activation's output; beside experts the shared one's."""
        return self.kind.mlp.ffn // self.tp

    @cached_property
    def projected(self) -> int:
        """Inside the MLP, of gate and up together."""
        return self.kind.mlp.projected // self.tp

    @cached_property
    def q(self) -> int:
        """Queries."""
        return self.shape.heads * self.shape.resolved_head_dim // self.tp

    @cached_property
    def o(self) -> int:
        """Outputs of attention."""
        return self.shape.heads * self.shape.value_dim // self.tp

    @cached_property
    def kv(self) -> int:
        """Keys and values together."""
        return self.shape.kv_heads * (self.shape.resolved_head_dim + self.shape.value_dim) // self.tp

    @cached_property
    def lse(self) -> int:
        """Bytes of log-sum-exp, in float32."""
        return 4 * self.shape.heads // self.tp

    @cached_property
    def weights(self) -> int:
        """Parameters of the layer's linear layers on this rank, but for those of experts."""
        mlp, hidden = self.kind.mlp, self.shape.hidden
        replicated = self.shape.latent.replicated_weights(hidden)
        shared = self.shape.mixer_weights(self.kind) - replicated + mlp.dense(hidden)
        return shared // self.tp + replicated + mlp.router(hidden)

    @property
    def _has_mlp(self) -> bool:
        return self.kind.mlp.projected > 0 or self._mixes

    def kept_by_core(self) -> int:
        """Bytes that a recurrent core and the gated norm behind it keep at home: the rows before the convolution, its
        gates, o and its gate; and of a gate behind attention. Unless all is recomputed, what the norm keeps for itself
        and its gated output are kept too. Of attention itself nothing: where its tensors are is the caller's to say."""
        hybrid, again = self.shape.hybrid, self.recompute != "all"
        if not self.kind.recurrent:
            return self.value * self.o * (1 + again) if hybrid.output_gate else 0
        of_norm = self._kept_by_gated_norm() if again else 2 * self.value
        rows = self.value * hybrid.channels + of_norm * hybrid.values
        return (rows + 8 * (1 + again) * hybrid.value_heads) // self.tp

    def _kept_by_gated_norm(self) -> int:
        """Bytes for each channel of a recurrent core's output. A gated delta net's norm keeps o and the gate, and what
        it multiplies by the gate: torch.compile saves a kernel's output, and never runs the kernel again. Mamba-2's
        keeps x, the gate and its SiLU, their product, and that normalised, all in float32. The output projection keeps
        what it reads."""
        return 4 * self.value if self.kind.recurrent == DELTA_NET else self.value + 5 * 4

    def core_at_work(self) -> int:
        """Bytes of a token in the backward of a recurrent core: of each head q, k, v and their gradients twice, dO,
        what rows are solved to, and at the borders of chunks states with gradients. Of attention nothing."""
        if not self.kind.recurrent:
            return 0
        what = self.shape.hybrid.recurrence(self.kind.recurrent, self.tp)
        keys, values = what.key_dim, what.value_dim
        borders = 2 * keys * values // _CHUNK_ROWS
        return self.value * what.heads * (3 * (2 * keys + values) + values + keys + 2 * values + borders)

    @cached_property
    def expert_weights(self) -> int:
        """Parameters of experts on this rank."""
        return self.kind.mlp.all_experts(self.shape.hidden) // self.ep

    @property
    def _mixes(self) -> bool:
        """The layer has experts."""
        return self.kind.mlp.experts.count > 0

    @cached_property
    def _experts(self) -> ExpertBytes:
        return ExpertBytes(self.kind.mlp.experts, self.shape.hidden, self.tp, self.value)

    @cached_property
    def norms(self) -> int:
        """Norms of the residual stream and of what is added to it, each with a weight per element of it."""
        variant = self.shape.variant
        return {"pre": 2, "post": 2, "both": 4}[variant.norms] - variant.parallel_mlp - (not self._has_mlp)

    @property
    def recomputed_whole(self) -> bool:
        """Core attention is computed again too: megatron's own layers are."""
        return self.recompute == "all" and not self.disaggregated

    @property
    def _megatrons(self) -> bool:
        """Megatron's own layers run: attention is at home, and no variant needs ours."""
        shape = self.shape
        own = shape.variant.own_layers or shape.experts.count or shape.hybrid.pattern or shape.latent.kv_rank
        return not self.disaggregated and not own

    # Bytes that are kept of one token until its backward.

    def kept_beside_attention(self) -> int:
        """All but q, k, v, o and log-sum-exp of the attention kernel; where servers keep these, o at home is in it."""
        if self.recomputed_whole:
            return self.value * self.hidden + self.kept_by_experts()
        o = self.o if self.disaggregated and self.keep and not self.kind.recurrent else 0
        if self.recompute == "all":
            # Each segment keeps what goes in: the residual stream, and o, which resend holds anyway. A recurrent
            # core's is counted with it.
            return self.value * (self.hidden + o) + self.kept_by_core() + self.kept_by_experts()
        kept = self.segment() + self._head_norms() + self._latent_rows()
        kept += self.kept_by_experts() - self.recomputed_mlp()
        return kept + self.kept_by_core()

    def segment(self) -> int:
        """Bytes that the rest of a layer keeps beside the attention kernel's tensors; where servers keep these, o at
        home is among them.

        Kept are the inputs of two norms, with the number that multiplied each row, and the inputs of SwiGLU. From these
        the inputs of matrix products are computed again. megatron's own layers, where attention is at home, keep the
        norms' outputs too. Norms behind attention and MLP keep their outputs."""
        variant = self.shape.variant
        kept = (1 if variant.parallel_mlp or not self._has_mlp else 2) + (0 if variant.norms == "pre" else 2)
        elements, copies = kept * self.hidden + self.projected, 0
        if self.fp8 != "none":
            # Linear layers keep FP8 copies of what they are given, but of o only where scales come from earlier steps.
            copies = 2 * self.hidden + self.ffn + (self.o if self.fp8 == "delayed" else 0)
        elif self._megatrons:
            elements += 2 * self.hidden
        if self.keep_outputs:
            elements += (0 if self._mixes else self.ffn) + self._normed_inputs
        if self.disaggregated and self.keep:
            elements += self.o if not self.kind.recurrent else 0  # o at home
        return self.value * elements + copies + self.norms * 4

    def kept_by_experts(self) -> int:
        """Bytes that experts and their router keep; only what they read, and where it went, where they are computed
        again."""
        if self.recompute == "none":
            return self._experts.kept()
        return self._experts.way() if self.recompute == "all" else self._experts.kept_when_recomputed()

    @property
    def _normed_inputs(self) -> int:
        """Norms' outputs that matrix products are given, where only ``keep_outputs`` has them kept."""
        if self._megatrons or self.shape.variant.norms == "post":
            return 0
        # Experts and latent attention keep what they read in any case.
        return self.hidden * (2 - self._mixes - bool(self.shape.latent.kv_rank))

    def _head_norms(self) -> int:
        """Norms of query and key heads keep the projection. megatron's own layers copy queries out of it first, and
        keep values as a part of it. They also keep what each head was multiplied by, and cosines and sines."""
        if not self.shape.qk_norm or self.kind.recurrent:
            return 0
        if self.shape.variant.query_key_norm == "width":  # torch's operations, in float32
            return self.value * self.kv // 2 + 2 * 4 * (self.q + self.kv // 2)
        if not self._megatrons:
            return self.value * (self.q + self.kv)
        head_dim = self.shape.resolved_head_dim
        elements = 2 * self.q + self.kv // 2 + 4 * head_dim
        return self.value * elements + 4 * (self.q + self.kv // 2) // head_dim

    def _latent_rows(self) -> int:
        """Bytes of the first norm's output, which two projections read; latent rows before and behind their norms, with
        the number that multiplied each; and cosines and sines of queries and of keys."""
        latent = self.shape.latent
        if not latent.kv_rank:
            return 0
        rows = self.shape.hidden + 2 * (latent.q_rank + latent.kv_rank) + latent.rotary_dim
        shared = self.tp if self.sequence_parallel else 1
        return (self.value * rows + 4 * (1 + (latent.q_rank > 0))) // shared + 4 * self.value * latent.rotary_dim

    def recomputed_mlp(self) -> int:
        """Bytes inside the MLP that are not kept where it is recomputed: SwiGLU's input, and FP8 copies."""
        if self.recompute != "mlp":
            return 0
        inside = self.value * self.projected
        if self.fp8 != "none":
            inside += self.hidden + self.ffn
            # megatron's own layers keep the norm's output in place of its copy.
            inside -= 0 if self.disaggregated else self.value * self.hidden
        return inside

    # Bytes that are there only for a moment.

    def mlp_at_work(self) -> int:
        """Bytes of a token while SwiGLU computes its gradient: gradients of its output and input, the norm's output,
        which came back; where recomputed, SwiGLU's input and what was computed from it. What a layer that is recomputed
        as a whole keeps meanwhile is not in it."""
        if self._mixes:
            return self._experts_at_work()
        normed = self.hidden if not self._megatrons and self.fp8 == "none" else 0
        # SwiGLU's kept output has made room for its gradient.
        elements = self.projected + (0 if self.keep_outputs else self.ffn + normed)
        if self.recompute != "none" and not self.recomputed_whole:
            elements += self.projected + self.hidden
        if self.recompute == "all" and self.disaggregated:
            elements += self.hidden  # the residual stream between attention and MLP
        return self.value * elements

    def latent_at_work(self) -> int:
        """Bytes of a token while a recomputed segment's expanded keys and values get their gradients: all that its
        backward reads, q, k and v once more with their gradients, and the widest of two projections' gradients. 0
        where no segment is recomputed."""
        latent = self.shape.latent
        if not latent.kv_rank or self.recompute != "all" or not self.disaggregated:
            return 0
        projected = self.shape.heads * (latent.key_dim + latent.value_dim) // self.tp
        elements = 4 * self.hidden + self.projected + self.ffn + 2 * (self.q + self.kv) + max(self.q, projected)
        return self.value * elements + self._latent_rows() + (self._experts.again() if self._mixes else 0)

    def _experts_at_work(self) -> int:
        """The same of a layer with experts, whose gradients take more than those of the shared one."""
        rows = {"none": int(self.disaggregated), "mlp": 0, "all": 1}[self.recompute] + (self.ffn > 0)
        elements, again = rows * self.hidden, 0
        if self.recompute != "none":
            again = self._experts.again()
            elements += 0 if self.recomputed_whole else self.projected
        beside = self.disaggregated and self.recompute != "all"
        return self.value * elements + self._experts.at_work(self.ep, beside, self.recompute == "mlp") + again

    def freed_by_mlp(self) -> int:
        """Bytes of a token that the backward of the layer's MLP frees; of a recomputed segment its residual stream."""
        if self.recompute == "all":
            return self.value * self.hidden
        normed = self._normed_inputs if self.shape.latent.kv_rank else self._normed_inputs // 2
        outputs = self.ffn + normed if self.keep_outputs else 0
        return self.value * (self.hidden + self.projected + outputs) - self.recomputed_mlp() + self.kept_by_experts()

    def around_work(self, rows: int) -> int:
        """The angles and the gradient of the layer's output, of all ``rows`` of a micro-batch."""
        return (4 * self.shape.rotary_dim + self.value * self.hidden) * rows

    def copies_at_work(self) -> int:
        """FP8 copies of weights that are there for a product, of which the MLP's first is the largest, or for a
        recomputed segment; of experts what autograd gets in place of a weight's gradient."""
        if self._mixes:
            return self.value * self.shape.hidden * self.kind.mlp.experts.ffn
        if self.fp8_weights:
            return self.shape.hidden * self.projected  # by columns
        return 2 * self.weights if self.fp8 != "none" and self.recompute == "all" else 0

    def loss_at_work(self, rows: int, vocabulary: int) -> int:
        """Bytes of the loss of ``rows`` rows: logits, the weight's gradient in float32, and around the layers the final
        norm's input and output and the gradient of that."""
        table = vocabulary * self.shape.hidden // self.tp
        logits = min(LOGITS_BYTES, rows * table // self.shape.hidden * self.value)
        return logits + 4 * table + 3 * self.value * rows * self.hidden


def parameters_of_rank(
    shape: ModelShape, stage_layers: list[LayerBytes], vocabulary: int, first: bool, last: bool
) -> int:
    """Parameters of one rank of a pipeline stage, but for those of experts.

    Args:
        shape: of the model.
        stage_layers: of the stage.
        vocabulary: rows of the embedding.
        first: the stage has the embedding.
        last: it has the output layer, which is the embedding where it is tied and the stage has both.
    """
    tables = 1 if first and last and shape.tie_embeddings else first + last
    norms = (sum(layer.norms for layer in stage_layers) + last) * shape.hidden
    norms += len(stage_layers) * shape.latent.norm_weights()
    weights = sum(layer.weights for layer in stage_layers)
    return weights + norms + tables * (vocabulary * shape.hidden // stage_layers[0].tp)


def expert_parameters_of_rank(stage_layers: list[LayerBytes]) -> int:
    """Parameters of experts on one rank of a pipeline stage, whose ranks with the same ones share their optimizer's
    state."""
    return sum(layer.expert_weights for layer in stage_layers)
