"""Peak memory of every pipeline stage, predicted from the settings before anything is built.

The count is what torch allocates on the stage's busiest rank at one of two moments, whichever needs more. At the first
one most micro-batches are in flight, and the backward of the oldest one begins. Then there are weights, gradients and
optimizer state, and what each layer keeps of each micro-batch. The layer or the loss at work needs some memory for
itself, too. At the second moment the optimizer's step runs.

NVSHMEM's receive buffer and what lies outside torch are counted where a run is refused
(distca/train/run/memory_fit.py); fragmentation is not. Sizes per token follow what autograd saves in megatron-core's
local layers, and in FP8 what Transformer Engine's linear layers do.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.device.sizes import STAYING_NANO_BATCHES
from distca.models.layer_bytes import LayerBytes, expert_parameters_of_rank, parameters_of_rank
from distca.models.model_bytes import ModelBytes, StateTypes
from distca.train.config.schema import RunConfig
from distca.train.run.state_memory import StateMemory, state_memory
from distca.words import format_bytes

GIB = 2**30
BUSY_SERVER_Q, BUSY_SERVER_KV, BUSY_SERVER_OTHERS = 1.33, 2.16, 0.17
"""Rows at a busy server, over its home rows: query rows of one nano-batch; key rows, each once; and query rows that
live elsewhere. Plans level seconds, not rows, and a task brings its whole context. These are means of six steps of 128K
tokens per rank with contexts as long (tests/train/run/test_stage_memory.py). Long runs on many ranks meet busier
servers."""
LONG_DOCUMENT_KV = 1.0
"""Key rows that the busiest server of a document over several ranks keeps, over a nano-batch's home rows. They count
for each nano-batch and each rank that the document spans. It is 1, as that server keeps all keys once."""
REGIONS_KV = 2.3, {1: 1.05, 2: 1.75}
"""Key rows that a nano-batch's tasks compute with, over a nano-batch's home rows. The first is that of a busy server.
The second, by number of nano-batches, is that of the busiest server of a long document, for each rank that it spans.
Its tasks read all keys, and a second range of the document has a copy of its keys. With two nano-batches that is so in
pong, as ping's last rows are elsewhere. Plans have up to 2.2, and more where a shorter document shares the pool."""


HALOS = 2.0
"""Windows of keys that live elsewhere, at a busy home rank and for each nano-batch; each shard whose document began
before it has one."""


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
        lines.append(f"Predicted peak memory of a rank{where}: {format_bytes(stage.total)} ({said}){host}")
    return lines


class _Stage:
    def __init__(self, config: RunConfig, world_size: int, vocabulary: int, stage: int) -> None:
        model, parallel = config.model, config.parallel
        self._config, self._stage, self._stages = config, stage, parallel.pp
        self._data_parallel = max(parallel.data_parallel(world_size), 1)
        self._layers = len(model.layer_kinds) // parallel.pp
        kinds = model.layer_kinds[stage * self._layers : (stage + 1) * self._layers]
        each = {
            kind: LayerBytes(
                shape=model,
                kind=kind,
                tp=parallel.tp,
                ep=parallel.ep,
                sequence_parallel=parallel.sequence_parallel,
                value=2 if config.train.precision == "bf16" else 4,
                fp8=config.train.fp8,
                fp8_weights=config.train.fp8_weights,
                keep_outputs=config.train.keep_outputs == "all",
                recompute=config.resolved_recompute,
                disaggregated=config.cad.enabled,
                keep=config.resolved_backward == "keep",
            )
            for kind in dict.fromkeys(kinds)
        }
        self._by_layer = [each[kind] for kind in kinds]
        # Widths are those of all layers; where MLPs differ, the widest is the one at work when most is needed.
        self._layer = layer = max(each.values(), key=LayerBytes.mlp_at_work)
        self._value, self._hidden = layer.value, layer.hidden
        self._q, self._o, self._kv, self._lse = layer.q, layer.o, layer.kv, layer.lse
        self._rows = config.data.tokens_per_rank
        self._half = -(-self._rows // 2) if config.cad.enabled and config.cad.ping_pong else self._rows
        self._turned = model.rotary_dim
        self._vocabulary = vocabulary
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
        self._states = StateMemory(0, 0)
        recurrent = "".join(kind.recurrent for kind in kinds)
        if recurrent and config.cad.enabled:
            what = model.hybrid.recurrence(recurrent[0], parallel.tp)
            self._states = state_memory(what, self._data_parallel, spanned)
        self._recurrent = len(recurrent)
        # Layers with a window are computed at home; with some without, these need most.
        if all(model.windows):
            self._server_q = float(self._half)
            self._server_kv = self._half * max(self._keys_at_home(window) for window in model.windows)
            self._copied_kv = 0.0

    def predict(self) -> StageMemory:
        in_flight = self._in_flight()
        by_layer = [layer.kept_beside_attention() for layer in self._by_layer]
        if not self._layer.recomputed_whole:
            by_layer = [
                kept + (self._attention(layer.kind.attention.window) if layer.kind.attention else 0)
                for kept, layer in zip(by_layer, self._by_layer, strict=True)
            ]
        kept, host = sum(by_layer), 0
        if self._config.train.offload == "all":
            staying = min(self._layers, STAYING_NANO_BATCHES // self._halves)
            kept, host = sum(sorted(by_layer)[-staying:]), self._rows * kept
        return StageMemory(
            model=self._model_bytes(),
            micro_batches=in_flight,
            activations=self._rows * (in_flight * (kept + self._rotation()) + self._angles_in_flight(in_flight))
            + in_flight * self._recurrent * self._states.kept,
            working=max(self._layer_at_work(), self._loss_at_work()) + self._transfers(),
            host=host,
        )

    @property
    def _last(self) -> bool:
        return self._stage == self._stages - 1

    def _model_bytes(self) -> ModelBytes:
        train, model = self._config.train, self._config.model
        types = StateTypes(
            narrow=train.precision == "bf16",
            narrow_gradients=train.gradients == "bfloat16",
            narrow_moments=train.moments == "bfloat16",
            fp8=train.fp8,
            fp8_weights=train.fp8_weights,
            recompute_all=train.recompute == "all",
        )
        sharded, layers, parallel = self._config.optimizer.distributed, self._by_layer, self._config.parallel
        dense = types.bytes_of(
            parameters_of_rank(model, layers, self._vocabulary, self._stage == 0, self._last),
            sum(layer.weights for layer in layers),
            self._data_parallel if sharded else 1,
        )
        replicas = self._data_parallel * parallel.tp // parallel.ep
        return dense + types.bytes_of(expert_parameters_of_rank(layers), 0, replicas if sharded else 1)

    def _in_flight(self) -> int:
        behind = self._stages - 1 - self._stage
        most = 2 * behind + 1 if self._config.cad.enabled else behind + 1
        return min(most, self._config.train.micro_batches) if self._stages > 1 else 1

    # Bytes that are kept of one token until its backward.

    def _attention(self, window: int) -> int:
        """q, k, v, o and log-sum-exp: at home (resend, attention at home) or, with contexts, at the server (keep). It
        keeps o of rows that live elsewhere; home keeps log-sum-exp with sinks."""
        keep = self._config.cad.enabled and self._config.resolved_backward == "keep"
        o, contexts = (self._others, self._contexts) if keep else (1.0, 1.0)
        if keep and window:
            o, contexts = 0.0, self._keys_at_home(window)
        lse = self._lse * (2 if keep and self._config.model.sinks else 1)
        return self._value * int(self._q + o * self._o + contexts * self._kv) + lse

    def _keys_at_home(self, window: int) -> float:
        """Rows of keys of a layer with a window over a nano-batch's home rows: these, and those before a few shards."""
        return min(1.0 + HALOS * (window - 1) / self._half, max(self._contexts, 1.5))

    def _rotation(self) -> int:
        """Bytes of one token's float32 cosines and sines, for all layers together; twice as many where layers turn in
        two ways. Layers with latent attention have their own, and only the angles of nano-batches in common."""
        model = self._config.model
        ways = self._halves - 1 if model.latent.kv_rank else 1 if model.variant.turns_alike else 2
        return 4 * self._turned * ways

    def _angles_in_flight(self, in_flight: int) -> int:
        """Bytes of one token's angles in all micro-batches in flight but the newest, whose angles are there in any
        case. Only layers that are recomputed as a whole are given angles."""
        return 4 * self._turned * (in_flight - 1) if self._layer.recomputed_whole else 0

    # What exists only for a moment.

    def _layer_at_work(self) -> int:
        """At one of the moments of the top layer's backward, when nearly all is still kept."""
        core = max(layer.core_at_work() for layer in self._by_layer)
        moments = [self._half * self._mlp_at_work(), self._half * self._layer.latent_at_work()]
        moments.append(self._half * core + self._states.at_work)
        if self._config.cad.enabled:
            if self._halves == 2:
                moments.append(self._second_mlp_at_work())
            moments.append(self._server_at_work())
        return max(moments) + self._layer.around_work(self._rows) + self._layer.copies_at_work()

    def _mlp_at_work(self) -> int:
        """Bytes per token when SwiGLU computes its gradient, and what is there beside."""
        needed = self._layer.mlp_at_work()
        if self._layer.recomputed_whole:
            return needed + self._attention(0) + self._layer.segment()
        if self._config.train.offload == "all":
            # Fullest between two layers: q, k, v of the upper one and their gradients, while as much is still to come
            # back of the lower one.
            needed += self._value * (self._q + self._kv)
        return needed

    def _second_mlp_at_work(self) -> int:
        """Bytes when SwiGLU of the second nano-batch computes its gradient. The first one's attention is already on its
        way, with dO and the gradient of the residual stream, and its MLP's kept rows are free."""
        first = self._value * (self._o + self._hidden) - self._layer.freed_by_mlp()
        return self._half * (self._mlp_at_work() + first) + self._sent_to_server()

    def _server_at_work(self) -> int:
        """Bytes in the kernel's backward of one nano-batch, when the rows of the other are already there. It adds
        gradients up in float32 and rounds them. With keep it needs all o rows of the nano-batch together, and the keys
        of every task of a long document."""
        gradients = self._server_q * self._q + self._server_kv * self._kv
        home = (
            self._value * (self._half * self._q + self._rows * self._hidden) - self._rows * self._layer.freed_by_mlp()
        )
        o = self._value * self._server_q * self._o if self._config.resolved_backward == "keep" else 0
        o += self._value * self._copied_kv * self._kv
        return self._halves * self._sent_to_server() + int((4 + self._value) * gradients + o) + home

    def _sent_to_server(self) -> int:
        """Bytes of a server's rows of one nano-batch in backward: dO, and with sinks log-sum-exp; with resend also q,
        k, v, o and log-sum-exp."""
        if self._config.resolved_backward == "keep":
            lse = self._lse if self._config.model.sinks else 0
            return int(self._server_q * (self._value * self._o + lse))
        q, kv = self._value * (self._q + 2 * self._o) + self._lse, self._value * self._kv
        return int(self._server_q * q + self._server_kv * kv)

    def _loss_at_work(self) -> int:
        return self._layer.loss_at_work(self._rows, self._vocabulary) if self._last else 0

    def _transfers(self) -> int:
        """Activations and gradients of other micro-batches that are there during a backward; 1F1B drops the gradient
        that it passed on when it has the next one."""
        first, last = self._stage == 0, self._last
        sent, received = (not last, not first) if self._config.cad.enabled else (False, not first)
        return (sent + received) * self._value * self._rows * self._hidden
