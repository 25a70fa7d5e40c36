"""Peak memory of every pipeline stage, predicted from the settings before anything is built.

Counted is what torch allocates on the stage's busiest rank at the moment when most micro-batches are in flight and the
backward of the oldest one begins: weights, gradients and optimizer state; what each layer keeps of each micro-batch;
and what the layer or the loss at work needs for itself. Not counted are the CUDA context, NCCL's buffers, an NVSHMEM
heap and fragmentation. Sizes per token follow what autograd saves in megatron-core's local layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.train.progress import format_bytes
from distca.train.settings import ConfigError, RunConfig

GIB = 2**30
_LOGITS_BYTES = 2 << 30
"""Of one chunk of the output layer's logits (megatron_patches/output_loss.py)."""


@dataclass(frozen=True)
class StageMemory:
    """Predicted bytes of one stage's rank.

    Attributes:
        weights: parameters as the layers use them.
        gradients: float32 buffers.
        optimizer: main weights and Adam's moments on this rank.
        micro_batches: how many are in flight at most.
        activations: what they keep.
        working: what the layer or the loss at work needs for itself, attention buffers and stage transfers included.
    """

    weights: int
    gradients: int
    optimizer: int
    micro_batches: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


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
            "weights": stage.weights,
            "gradients": stage.gradients,
            "optimizer": stage.optimizer,
            f"activations of {stage.micro_batches} micro-batch{'es' if stage.micro_batches > 1 else ''}": (
                stage.activations
            ),
            "working memory": stage.working,
        }
        where = f" of stage {number}" if len(stages) > 1 else ""
        said = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        lines.append(f"Predicted peak memory{where}: {format_bytes(stage.total)} ({said})")
    return lines


def check_memory(config: RunConfig, stages: list[StageMemory], available: int) -> None:
    """Refuse a run that clearly does not fit.

    Args:
        config: the run.
        stages: its prediction.
        available: bytes of the device's memory.

    Raises:
        ConfigError: a stage is predicted to need more than 1.1 times what there is.
    """
    worst = max(range(len(stages)), key=lambda number: stages[number].total)
    need = stages[worst].total
    if need <= 1.1 * available:
        return
    where = f"Stage {worst} of {len(stages)}" if len(stages) > 1 else "A rank"
    raise ConfigError(
        f"{where} would need about {need / GIB:.0f} GiB of device memory, and the device has {available / GIB:.0f}: "
        f"{'; '.join(_remedies(config, stages[worst]))}."
    )


def _remedies(config: RunConfig, stage: StageMemory) -> list[str]:
    remedies = []
    if stage.activations + stage.working > stage.total / 3:
        saving = {"none": "mlp", "mlp": "all"}.get(config.train.recompute)
        if saving == "mlp" or (saving == "all" and config.cad.enabled):
            remedies.append(f"set train.recompute to {saving}")
        remedies.append(f"lower data.tokens_per_rank ({config.data.tokens_per_rank})")
    remedies.append(f"raise parallel.tp ({config.parallel.tp}) or parallel.pp ({config.parallel.pp})")
    if not config.optimizer.distributed:
        remedies.append("set optimizer.distributed to true")
    return remedies


class _Stage:
    def __init__(self, config: RunConfig, world_size: int, vocabulary: int, stage: int) -> None:
        model, parallel = config.model, config.parallel
        self._config, self._stage, self._stages = config, stage, parallel.pp
        self._data_parallel = max(parallel.data_parallel(world_size), 1)
        self._layers = model.layers // parallel.pp
        self._value = 2 if config.train.precision == "bf16" else 4
        # Widths of one tensor-parallel rank; the residual stream is whole without sequence parallelism.
        self._hidden = model.hidden // parallel.tp if parallel.sequence_parallel else model.hidden
        self._q = model.heads * model.resolved_head_dim // parallel.tp
        self._kv = 2 * model.kv_heads * model.resolved_head_dim // parallel.tp
        self._ffn = model.ffn // parallel.tp
        self._lse = 4 * model.heads // parallel.tp
        self._rows = config.data.tokens_per_rank
        self._half = -(-self._rows // 2) if config.cad.enabled and config.cad.ping_pong else self._rows
        self._embedding = vocabulary * model.hidden // parallel.tp

    def predict(self) -> StageMemory:
        weights = self._parameters()
        wide = 4 * weights if self._value == 2 else 0  # float32 weights are their own main weights
        shards = self._data_parallel if self._config.optimizer.distributed else 1
        in_flight = self._in_flight()
        return StageMemory(
            weights=self._value * weights,
            gradients=4 * weights,
            optimizer=(wide + 8 * weights) // shards,
            micro_batches=in_flight,
            activations=in_flight * (self._layers * self._rows * self._kept() + self._rows * self._edge()),
            working=max(self._layer_at_work(), self._loss_at_work()) + self._transfers(),
        )

    @property
    def _last(self) -> bool:
        return self._stage == self._stages - 1

    def _parameters(self) -> int:
        model, tp = self._config.model, self._config.parallel.tp
        layer = model.hidden * (2 * self._q + self._kv + 3 * self._ffn) + 2 * model.hidden
        tables = (self._stage == 0) + self._last
        if model.tie_embeddings and self._stages == 1:
            tables = 1
        assert model.hidden % tp == 0
        return self._layers * layer + tables * self._embedding + (model.hidden if self._last else 0)

    def _in_flight(self) -> int:
        behind = self._stages - 1 - self._stage
        most = 2 * behind + 1 if self._config.cad.enabled else behind + 1
        return min(most, self._config.train.micro_batches) if self._stages > 1 else 1

    def _kept(self) -> int:
        """Bytes that one layer keeps of one token until its backward."""
        if self._config.train.recompute == "all":
            # Each segment keeps what goes in: the residual stream, and o, which resend holds anyway.
            o = 0 if self._config.resolved_backward == "resend" else self._q
            return self._attention() + self._value * (self._hidden + o)
        return self._attention() + self._segment() - self._recomputed_mlp()

    def _attention(self) -> int:
        """q, k, v, o and log-sum-exp: at home (resend, or attention at home) or at the server (keep)."""
        return self._value * (self._q + self._kv + self._q) + self._lse

    def _segment(self) -> int:
        """What the rest of a layer keeps beside o: inputs of two norms and of SwiGLU, from which the inputs of matrix
        products are computed again. megatron's own layers, where attention is at home, keep the norms' outputs too."""
        elements = 2 * self._hidden + 2 * self._ffn
        if not self._config.cad.enabled:
            elements += 2 * self._hidden + 4 * self._config.model.resolved_head_dim  # cosines and sines of q and of k
        elif self._config.resolved_backward == "keep":
            elements += self._q  # o at home, beside the server's
        return self._value * elements

    def _recomputed_mlp(self) -> int:
        """What lies inside the MLP, where it is recomputed: SwiGLU's input."""
        return self._value * 2 * self._ffn if self._config.train.recompute == "mlp" else 0

    def _edge(self) -> int:
        """Around the layers: the last stage's final norm keeps its input and its output."""
        return self._value * 2 * self._hidden if self._last else 0

    def _layer_at_work(self) -> int:
        """Backward of one layer, of one half: gradients inside the MLP and, recomputed, the segment itself; beside it
        the attention server's buffers of both halves."""
        backward = self._value * (3 * self._ffn + self._hidden)
        backward += self._segment() if self._config.train.recompute == "all" else self._recomputed_mlp()
        served = 0
        if self._config.cad.enabled:
            # q, o, dO, dq and a whole context's k, v and their gradients.
            served = self._half * (self._value * (4 * self._q + 4 * self._kv) + self._lse)
        return self._half * backward + served

    def _loss_at_work(self) -> int:
        if not self._last:
            return 0
        logits = min(_LOGITS_BYTES, self._rows * self._embedding // self._config.model.hidden * self._value)
        return logits + 4 * self._embedding + self._value * self._rows * self._hidden

    def _transfers(self) -> int:
        """Activations and gradients that are on their way between stages."""
        return 2 * self._value * self._rows * self._hidden if self._stages > 1 else 0
