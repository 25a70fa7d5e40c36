"""Peak memory of every pipeline stage, predicted from the settings before anything is built.

Counted is what torch allocates on the stage's busiest rank at the moment when most micro-batches are in flight and the
backward of the oldest one begins: weights, gradients and optimizer state; what each layer keeps of each micro-batch;
and what the layer or the loss at work needs for itself; or later, when the optimizer's step needs more. NVSHMEM's
receive buffer and what lies outside torch are counted where a run is refused (distca/train/run/memory_fit.py);
fragmentation is not. Sizes per token follow what autograd saves in megatron-core's local layers, and in FP8 what
Transformer Engine's linear layers do.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.device.sizes import LOGITS_BYTES, STAYING_HALVES
from distca.train.config.schema import RunConfig
from distca.train.run.model_bytes import ModelBytes, model_bytes
from distca.words import format_bytes

GIB = 2**30
BUSY_SERVER_Q, BUSY_SERVER_KV, BUSY_SERVER_OTHERS = 1.33, 2.16, 0.17
"""Rows of queries (of one half), of keys, each once, and of queries that live elsewhere at a busy server, over its home
rows. Plans level seconds, not rows, and a task brings its whole context: the mean of what
tests/train/run/test_stage_memory.py finds in six steps of 128K tokens per rank and as long contexts. Long runs on many
ranks meet busier servers."""
LONG_DOCUMENT_KV = 1.0
"""Rows of keys that the busiest server of a document that spans ranks keeps, over a half's home rows, per half and rank
spanned: all keys, once."""
REGIONS_KV = 2.3, {1: 1.05, 2: 1.75}
"""At a busy server, and by halves at the busiest of a long document, the same of keys that a half's tasks compute with:
the server of its end has all keys, of two halves all in the second; the first half's end, half of them, is computed
elsewhere. A second range of the same document has a copy of its keys. Plans have up to 2.2, and more where a shorter
document shares the pool."""


HALOS = 2.0
"""Windows of keys that live elsewhere, at a busy home rank and per half: shards whose document began before them."""


@dataclass(frozen=True)
class StageMemory:
    """Predicted bytes of one stage's rank.

    Attributes:
        model: what is there in all of a step, and what the optimizer's step needs when there are no activations.
        micro_batches: how many are in flight at most.
        activations: what they keep.
        working: what the layer or the loss at work needs for itself, attention buffers and stage transfers included.
        host: of activations that are kept in host memory.
    """

    model: ModelBytes
    micro_batches: int
    activations: int
    working: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.model.held + max(self.activations + self.working, self.model.update)


def predict_memory(config: RunConfig, world_size: int, vocabulary: int) -> list[StageMemory]:
    """The prediction for every stage.

    Args:
        config: a validated run.
        world_size: its ranks.
        vocabulary: rows of the embedding.
    """
    return [_Stage(config, world_size, vocabulary, stage).predict() for stage in range(config.parallel.pp)]


def describe(stages: list[StageMemory]) -> list[str]:
    """One line per stage for the log."""
    lines = []
    for number, stage in enumerate(stages):
        parts = {
            "weights": stage.model.weights,
            "gradients": stage.model.gradients,
            "optimizer": stage.model.optimizer,
            f"activations of {stage.micro_batches} micro-batch{'es' if stage.micro_batches > 1 else ''}": (
                stage.activations
            ),
            "working memory": stage.working,
        }
        if stage.activations + stage.working < stage.model.update:
            parts["or, later, the optimizer's step"] = stage.model.update
        where = f" of stage {number}" if len(stages) > 1 else ""
        said = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        host = f", beside {format_bytes(stage.host)} of activations in host memory" if stage.host else ""
        lines.append(f"Predicted peak memory{where}: {format_bytes(stage.total)} ({said}){host}")
    return lines


class _Stage:
    def __init__(self, config: RunConfig, world_size: int, vocabulary: int, stage: int) -> None:
        model, parallel = config.model, config.parallel
        self._config, self._stage, self._stages = config, stage, parallel.pp
        self._recompute = config.resolved_recompute
        self._data_parallel = max(parallel.data_parallel(world_size), 1)
        self._layers = config.model.layers // parallel.pp
        self._value = 2 if config.train.precision == "bf16" else 4
        self._fp8 = config.train.fp8 != "none"
        # Widths of one tensor-parallel rank; the residual stream is whole without sequence parallelism.
        self._hidden = model.hidden // parallel.tp if parallel.sequence_parallel else model.hidden
        self._q = model.heads * model.resolved_head_dim // parallel.tp
        self._kv = 2 * model.kv_heads * model.resolved_head_dim // parallel.tp
        self._ffn = model.ffn // parallel.tp
        self._lse = 4 * model.heads // parallel.tp
        self._rows = config.data.tokens_per_rank
        self._half = -(-self._rows // 2) if config.cad.enabled and config.cad.ping_pong else self._rows
        self._head_dim = model.resolved_head_dim
        self._embedding = vocabulary * model.hidden // parallel.tp
        alone = self._data_parallel * parallel.pp == 1
        self._server_q = self._half * (1.0 if alone else BUSY_SERVER_Q)
        self._halves = 2 if self._half < self._rows else 1
        spanned = min(config.data.context_length / self._rows, self._data_parallel)
        busy_kv = max(BUSY_SERVER_KV, LONG_DOCUMENT_KV * spanned)
        regions = max(REGIONS_KV[0], REGIONS_KV[1][self._halves] * spanned)
        # Alone, its own rows; pong computes with those of ping too.
        self._server_kv = self._half * (float(self._halves) if alone else regions)
        self._contexts = 1.0 if alone else busy_kv
        self._copied_kv = self._server_kv if self._halves == 2 and (alone or regions > REGIONS_KV[0]) else 0.0
        self._others = 0.0 if alone else BUSY_SERVER_OTHERS
        # Layers with a window are computed at home; with some without, these need most.
        self._windows = model.windows[stage * self._layers : (stage + 1) * self._layers]
        if all(model.windows):
            self._server_q = float(self._half)
            self._server_kv = self._half * max(self._keys_at_home(window) for window in model.windows)
            self._copied_kv = 0.0

    def predict(self) -> StageMemory:
        in_flight = self._in_flight()
        by_layer = [self._kept(window) for window in self._windows]
        kept, host = sum(by_layer), 0
        if self._config.train.offload == "all":
            staying = min(self._layers, STAYING_HALVES // self._halves)
            kept, host = sum(sorted(by_layer)[-staying:]), self._rows * kept
        return StageMemory(
            model=model_bytes(self._config, self._parameters(), self._in_linears(), self._data_parallel),
            micro_batches=in_flight,
            activations=self._rows * (in_flight * (kept + self._rotation()) + self._angles_in_flight(in_flight)),
            working=max(self._layer_at_work(), self._loss_at_work()) + self._transfers(),
            host=host,
        )

    @property
    def _recomputes_layers(self) -> bool:
        """As a whole, core attention too: megatron's own layers."""
        return self._recompute == "all" and not self._config.cad.enabled

    @property
    def _megatrons_layers(self) -> bool:
        """Megatron's own layers run: attention is at home, and no variant needs ours."""
        return not self._config.cad.enabled and not self._config.model.variant.own_layers

    @property
    def _last(self) -> bool:
        return self._stage == self._stages - 1

    def _parameters(self) -> int:
        model, tp = self._config.model, self._config.parallel.tp
        tables = (self._stage == 0) + self._last
        if model.tie_embeddings and self._stages == 1:
            tables = 1
        assert model.hidden % tp == 0
        norms = self._norms() * self._layers * model.hidden + (model.hidden if self._last else 0)
        return self._in_linears() + norms + tables * self._embedding

    def _norms(self) -> int:
        """Norms of the residual stream and of what is added to it, in a layer."""
        variant = self._config.model.variant
        return {"pre": 2, "post": 2, "both": 4}[variant.norms] - variant.parallel_mlp

    def _in_linears(self) -> int:
        """Parameters that are weights of the layers' linear layers."""
        return self._layers * self._config.model.hidden * (2 * self._q + self._kv + 3 * self._ffn)

    def _in_flight(self) -> int:
        behind = self._stages - 1 - self._stage
        most = 2 * behind + 1 if self._config.cad.enabled else behind + 1
        return min(most, self._config.train.micro_batches) if self._stages > 1 else 1

    # Bytes that are kept of one token until its backward.

    def _kept(self, window: int) -> int:
        """By a layer with a window, or one without: 0."""
        if self._recomputes_layers:
            return self._value * self._hidden
        if self._recompute == "all":
            # Each segment keeps what goes in: the residual stream, and o, which resend holds anyway.
            o = 0 if self._config.resolved_backward == "resend" else self._q
            return self._attention(window) + self._value * (self._hidden + o)
        return self._attention(window) + self._segment() + self._head_norms() - self._recomputed_mlp()

    def _attention(self, window: int) -> int:
        """q, k, v, o and log-sum-exp: at home (resend, attention at home) or, with contexts, at the server (keep). It
        keeps o of rows that live elsewhere; home keeps log-sum-exp with sinks."""
        keep = self._config.cad.enabled and self._config.resolved_backward == "keep"
        o, contexts = (self._others, self._contexts) if keep else (1.0, 1.0)
        if keep and window:
            o, contexts = 0.0, self._keys_at_home(window)
        lse = self._lse * (2 if keep and self._config.model.sinks else 1)
        return self._value * int((1 + o) * self._q + contexts * self._kv) + lse

    def _keys_at_home(self, window: int) -> float:
        """Rows of keys of a layer with a window over a half's home rows: these, and those before a few shards."""
        return min(1.0 + HALOS * (window - 1) / self._half, max(self._contexts, 1.5))

    def _segment(self) -> int:
        """What the rest of a layer keeps beside o: inputs of two norms, with what each row was multiplied by, and of
        SwiGLU, from which the inputs of matrix products are computed again. megatron's own layers, where attention is
        at home, keep the norms' outputs too. Norms behind attention and MLP keep what these put out."""
        variant = self._config.model.variant
        kept = (1 if variant.parallel_mlp else 2) + (0 if variant.norms == "pre" else 2)
        elements, copies = kept * self._hidden + 2 * self._ffn, 0
        if self._fp8:
            # Linear layers keep FP8 copies of what they are given, but of o only where scales come from earlier steps.
            copies = 2 * self._hidden + self._ffn + (self._q if self._config.train.fp8 == "delayed" else 0)
        elif self._megatrons_layers:
            elements += 2 * self._hidden
        elements += self._kept_outputs()
        if self._config.cad.enabled and self._config.resolved_backward == "keep":
            elements += self._q  # o at home
        return self._value * elements + copies + self._norms() * 4

    def _kept_outputs(self) -> int:
        """Outputs of SwiGLU and of the norms before matrix products, where they are kept; megatron's own layers keep
        those of norms in any case."""
        if self._config.train.keep_outputs != "all":
            return 0
        return self._ffn + self._normed_inputs()

    def _normed_inputs(self) -> int:
        """Norms' outputs that matrix products are given in a layer, where only :meth:`_kept_outputs` has them kept."""
        post = self._config.model.variant.norms == "post"
        return 0 if self._megatrons_layers or post else 2 * self._hidden

    def _head_norms(self) -> int:
        """Norms of query and key heads keep the projection, and what each head was multiplied by. megatron's own layers
        copy queries out of it first, keep values as a part of it, and cosines and sines of their own."""
        if not self._config.model.qk_norm:
            return 0
        elements = self._q + self._kv
        if self._config.model.variant.query_key_norm == "width":  # torch's operations, in float32
            return self._value * self._kv // 2 + 2 * 4 * (self._q + self._kv // 2)
        if self._megatrons_layers:
            elements = 2 * self._q + self._kv // 2 + 4 * self._head_dim
        return self._value * elements + 4 * (self._q + self._kv // 2) // self._head_dim

    def _recomputed_mlp(self) -> int:
        """What lies inside the MLP, where it is recomputed: SwiGLU's input, and FP8 copies."""
        if self._recompute != "mlp":
            return 0
        inside = self._value * 2 * self._ffn
        if self._fp8:
            inside += self._hidden + self._ffn
            # megatron's own layers keep the norm's output in place of its copy.
            inside -= 0 if self._config.cad.enabled else self._value * self._hidden
        return inside

    def _rotation(self) -> int:
        """By all layers together: float32 cosines and sines, of layers that turn in two ways twice."""
        return 4 * self._head_dim * (1 if self._config.model.variant.turns_alike else 2)

    def _angles_in_flight(self, in_flight: int) -> int:
        """By layers that are recomputed as a whole, which are given angles: those of all micro-batches but the newest,
        whose are there in any case."""
        return 4 * self._head_dim * (in_flight - 1) if self._recomputes_layers else 0

    # What exists only for a moment.

    def _layer_at_work(self) -> int:
        """At one of the moments of the top layer's backward, when nearly all is still kept."""
        angles = 4 * self._head_dim * self._rows
        gradient = self._value * self._rows * self._hidden  # of the stage's output
        moments = [self._half * self._mlp_at_work()]
        if self._config.cad.enabled:
            if self._halves == 2:
                moments.append(self._second_mlp_at_work())
            moments.append(self._server_at_work())
        return max(moments) + angles + gradient + self._copies_at_work()

    def _copies_at_work(self) -> int:
        """FP8 copies of weights that are there for a product, of which the MLP's first is the largest, or for a
        recomputed segment."""
        if self._config.train.fp8_weights:
            return 2 * self._config.model.hidden * self._ffn  # by columns
        return 2 * self._in_linears() // self._layers if self._fp8 and self._recompute == "all" else 0

    def _mlp_at_work(self) -> int:
        """Bytes per token when SwiGLU computes its gradient: that of its output and of its input, and the norm's
        output, which came back; where recomputed, SwiGLU's input and what was computed from it, or the whole layer."""
        normed = self._hidden if self._config.cad.enabled and not self._fp8 else 0
        elements = 3 * self._ffn + normed
        if self._config.train.keep_outputs == "all":
            elements = 2 * self._ffn  # SwiGLU's kept output has made room for its gradient
        if self._recomputes_layers:
            return self._value * elements + self._attention(0) + self._segment()
        if self._recompute != "none":
            elements += 2 * self._ffn + self._hidden
        if self._recompute == "all":
            elements += self._hidden  # the residual stream between attention and MLP
        if self._config.train.offload == "all":
            # Fullest between two layers: q, k, v of the upper one and their gradients, while as much is still to come
            # back of the lower one.
            elements += self._q + self._kv
        return self._value * elements

    def _second_mlp_at_work(self) -> int:
        """The same of the half that comes second: the first one's attention is already on its way, with dO and the
        gradient of the residual stream, and what its MLP had kept is free."""
        first = self._value * (self._q + self._hidden) - self._freed_by_mlp()
        return self._half * (self._mlp_at_work() + first) + self._sent_to_server()

    def _freed_by_mlp(self) -> int:
        """Bytes per token that the backward of a layer's MLP frees; of a recomputed segment its residual stream."""
        if self._recompute == "all":
            return self._value * self._hidden
        outputs = self._ffn + self._normed_inputs() // 2 if self._config.train.keep_outputs == "all" else 0
        return self._value * (self._hidden + 2 * self._ffn + outputs) - self._recomputed_mlp()

    def _server_at_work(self) -> int:
        """The kernel's backward of one half; what it needs of the other is already there. It adds gradients up in
        float32 and rounds them. With keep all o rows of the half are put together for it, and the keys of every task
        of a long document."""
        gradients = self._server_q * self._q + self._server_kv * self._kv
        home = self._value * (self._half * self._q + self._rows * self._hidden) - self._rows * self._freed_by_mlp()
        o = self._value * self._server_q * self._q if self._config.resolved_backward == "keep" else 0
        o += self._value * self._copied_kv * self._kv
        return self._halves * self._sent_to_server() + int((4 + self._value) * gradients + o) + home

    def _sent_to_server(self) -> int:
        """A server's rows of one half: dO, with sinks log-sum-exp; with resend also q, k, v, o and log-sum-exp."""
        if self._config.resolved_backward == "keep":
            lse = self._lse if self._config.model.sinks else 0
            return int(self._server_q * (self._value * self._q + lse))
        q, kv = self._value * 3 * self._q + self._lse, self._value * self._kv
        return int(self._server_q * q + self._server_kv * kv)

    def _loss_at_work(self) -> int:
        """Logits, the weight's gradient in float32, and around the layers the final norm's input and output and the
        gradient of that."""
        if not self._last:
            return 0
        logits = min(LOGITS_BYTES, self._rows * self._embedding // self._config.model.hidden * self._value)
        return logits + 4 * self._embedding + 3 * self._value * self._rows * self._hidden

    def _transfers(self) -> int:
        """Activations and gradients of other micro-batches that are there during a backward; 1F1B drops the gradient
        that it passed on when it has the next one."""
        first, last = self._stage == 0, self._last
        sent, received = (not last, not first) if self._config.cad.enabled else (False, not first)
        return (sent + received) * self._value * self._rows * self._hidden
