"""The settings of a training run: one tree of keyword-only dataclasses.

The field descriptions are what ``--help`` shows. ``distca.train.config.cli`` reads them from YAML and the command line;
checks that need more than one field, or the world size, are in ``distca.train.config.validate``. Steps are counted from
1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from distca.cad_options import CadOptions
from distca.models.shape import ModelShape
from distca.plan.cost.model import AttentionShape
from distca.plan.metrics import receive_buffer_gb

MEASURE = "measure"
"""The value of cad.cost_table that measures a table when a run starts."""
LARGEST_NARROW_BETA2 = 0.99
"""optimizer.beta2 up to which a second moment in bfloat16 still changes."""
RESUME_OR_START = ("job", "auto")
"""Values of checkpoint.resume that start a new run where there is nothing to go on with."""
RESUME_BY_NAME = ("latest", *RESUME_OR_START)
"""Values of checkpoint.resume that are no folder."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A LLaMA-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    layers: int = 4
    hidden: int = 128
    ffn: int = 384
    heads: int = 4
    kv_heads: int = 2


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is cut. What is left of the world is data parallel.

    Attributes:
        tp: tensor-parallel ranks; attention heads stay sharded over them.
        pp: pipeline stages; idle stages serve the others' attention.
        ep: expert-parallel ranks, consecutive ranks of a stage with whole experts each. It divides the ranks of a stage
            and the experts.
        sequence_parallel: shard activations between tensor-parallel blocks by tokens; has an effect with tp > 1.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = True

    def data_parallel(self, world_size: int) -> int:
        """Data-parallel ranks in a world of ``world_size`` ranks."""
        return world_size // (self.tp * self.pp)


@dataclass(frozen=True, kw_only=True)
class CadConfig(CadOptions):
    """Core attention disaggregation: which rank computes which attention, and how rows get there.

    Attributes:
        enabled: balance attention over all data-parallel ranks; false computes every document's attention at home.
    """

    enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of documents, and the way they fill the ranks.

    Attributes:
        source: where documents come from (docs/data.md); stdlib is the running Python's standard library.
        path: file, folder, .bin/.idx prefix, a blend's YAML file, or a mix: pretrain, prolong, pretrain-long or
            prolong-long.
        field: field of a JSON object, or column of a table, that holds the document; null takes text, with
            conversations messages.
        conversations: documents are conversations; only the assistant's turns are learned (docs/data.md).
        tokenizer: bytes, a tokenizer.json, or a folder that holds one.
        begin_token: token before every text; null takes the one of a model's folder, an empty one is none.
        end_token: the same behind every text.
        bad: what happens to a document that cannot be read or tokenized: error stops the run; skip leaves it out.
        cache: folder for tokens of texts, which all nodes see; null takes the folder tokens in output.
        vocabulary: token ids, of mix (0 = 256) and of indexed files without them.
        context_length: most tokens a document may have.
        longer: what happens to a longer document: split cuts it; skip leaves it out and counts it; error stops the run;
            null splits texts and skips conversations.
        tokens_per_rank: tokens per data-parallel rank and micro-batch; with sequence parallelism best a multiple of
            2 × tp.
        whole_documents: never let a document span ranks; implied when cad.enabled is false on several data-parallel
            ranks.
        validation_fraction: share of the documents held back for validation.
        seed: seed of the order of documents.
    """

    source: Literal["stdlib", "text", "jsonl", "parquet", "arrow", "blend", "indexed", "mix"] = "stdlib"
    path: str | None = None
    field: str | None = None
    conversations: bool = False
    tokenizer: str = "bytes"
    begin_token: str | None = None
    end_token: str | None = None
    bad: Literal["error", "skip"] = "error"
    cache: str | None = None
    vocabulary: int = 0
    context_length: int = 4096
    longer: Literal["split", "error", "skip"] | None = None
    tokens_per_rank: int = 4096
    whole_documents: bool = False
    validation_fraction: float = 0.02
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and then a schedule.

    Attributes:
        lr: learning rate of the first step after the warm-up.
        schedule: after the warm-up cosine and linear go down to min_lr; constant stays; wsd goes down linearly in the
            last decay_steps.
        decay_steps: steps in which wsd goes down; null takes a tenth of train.steps.
        min_lr: learning rate that a step after the last one would have; without effect with schedule constant.
        warmup_steps: steps before lr is reached; null takes a sixth of train.steps, at most 100, or in a resumed run
            what it had.
        weight_decay: decoupled weight decay.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: Adam's epsilon.
        clip_grad: largest global norm of the gradient; 0 does not clip.
        distributed: shard the optimizer's state over data-parallel ranks.
    """

    lr: float = 3e-3
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay_steps: int | None = None
    min_lr: float = 3e-4
    warmup_steps: int | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop.

    Attributes:
        steps: optimizer steps of the whole run, also of a resumed one.
        micro_batches: micro-batches per step and data-parallel rank.
        precision: type of weights and activations; bf16 keeps fp32 master weights.
        linears: linear layers of Megatron-Core (local), or of Transformer Engine (te), which needs GPUs and bf16; auto
            takes te where it can. The output layer is always Megatron-Core's.
        fp8: products of Transformer Engine's linear layers in FP8, scaled by each tensor's largest value (current), by
            earlier steps' (delayed), or by blocks' (blockwise).
        fp8_weights: hold these layers' weights as FP8 numbers alone, beside float32 main weights. Needs fp8 and
            optimizer.distributed.
        gradients: type in which gradients are added up and reduced; bfloat16 needs precision bf16, and rounds after
            every addition.
        moments: type of Adam's moments; bfloat16 needs precision bf16, optimizer.distributed, Transformer Engine's Adam
            and an optimizer.beta2 of at most 0.99.
        loss: what weighs the same in the loss of a step: every learned token, or every document or conversation that
            has some.
        recompute: what backward computes again: mlp = each layer's MLP; all = everything but core attention, with
            cad.enabled false whole layers; auto = the first that fits by prediction, none on CPUs.
        keep_outputs: outputs of norms and SwiGLU that are kept for backward, with recompute none and without fp8; auto
            = all where it fits by prediction, none on CPUs.
        offload: what waits in host memory until backward: all = what every layer needs, with recompute all,
            cad.backward resend, cad.enabled and no pipeline stages; auto = all where nothing else fits by prediction.
        seed: seed of the weights.
        time_limit: minutes of training after which the run saves and ends, within two steps; 0 sets no limit.
            SIGTERM and SIGUSR1 do the same.
        evaluate: only compute the validation loss of checkpoint.init_from or checkpoint.resume, also on other data;
            with data.validation_fraction 0 all of it counts.
        validate_every: steps between validations; 0 validates at the end alone.
        validate_batches: global batches per validation, always the same ones; a smaller set is repeated.
    """

    steps: int = 60
    micro_batches: int = 1
    precision: Literal["bf16", "fp32"] = "fp32"
    linears: Literal["auto", "local", "te"] = "auto"
    fp8: Literal["none", "current", "delayed", "blockwise"] = "none"
    fp8_weights: bool = False
    gradients: Literal["float32", "bfloat16"] = "float32"
    moments: Literal["float32", "bfloat16"] = "float32"
    loss: Literal["token", "document"] = "token"
    recompute: Literal["auto", "none", "mlp", "all"] = "auto"
    keep_outputs: Literal["auto", "none", "all"] = "auto"
    offload: Literal["auto", "none", "all"] = "auto"
    seed: int = 1234
    time_limit: float = 0.0
    evaluate: bool = False
    validate_every: int = 0
    validate_batches: int = 4


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and going on.

    Attributes:
        save_every: steps between checkpoints; 0 saves none by their number.
        save_every_minutes: minutes between checkpoints, by rank 0's clock; 0 saves none by the clock.
        save_at_end: also save after the last step.
        background: write while training goes on, from copies in host memory; with too little of it, and after the last
            step, training waits.
        resume: folder of a run to go on with; latest = the run of this name that saved last; job = what this Slurm job
            saved, or a new run; auto = what this job saved, or latest, or a new run. With job and auto a finished,
            saved run ends well at once.
        init_from: a Hugging Face folder to begin with: its weights, shape and tokenizer. A resumed run takes its own
            weights.
        export: an empty folder for the last step's weights, as a Hugging Face folder.
        keep: newest checkpoints that stay on disk.
    """

    save_every: int = 0
    save_every_minutes: float = 30.0
    save_at_end: bool = True
    background: bool = True
    resume: str | None = None
    init_from: str | None = None
    export: str | None = None
    keep: int = 2


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The records of a run: log lines, metrics, timeline and profile.

    Attributes:
        every: steps between progress lines where standard error is not a terminal; metrics.jsonl has every step.
        timeline_steps: first and last step of the timeline (timeline.json opens in Perfetto); a run that ends before
            records what it has.
        profile_steps: first and last step that torch's profiler records on every rank, into the run's folder profile.
        tensorboard: also write TensorBoard events.
        wandb: project of Weights & Biases that metrics also go to; needs the package wandb.
        memory: on CPUs, also record the memory of processes after each step; GPUs always record their peak.
    """

    every: int = 1
    timeline_steps: tuple[int, int] | None = None
    profile_steps: tuple[int, int] | None = None
    tensorboard: bool = True
    wandb: str | None = None
    memory: bool = False


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run.

    Attributes:
        name: name of the run.
        output: folder of all runs; a run writes into output/name, or name-2, name-3 ... where that exists.
        model: the model.
        parallel: how ranks share the model.
        cad: core attention disaggregation.
        data: the documents.
        optimizer: the optimizer and its learning rate.
        train: the loop.
        checkpoint: saving and going on.
        log: what is recorded.
    """

    name: str = "llama-tiny"
    output: str = "runs"
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cad: CadConfig = field(default_factory=CadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def resolved_cache(self) -> str:
        """data.cache, with null resolved."""
        return self.data.cache or f"{self.output}/tokens"

    @property
    def attention_shape(self) -> AttentionShape:
        """Attention heads of one tensor-parallel rank."""
        return self.model.attention_shape(self.parallel.tp, 2 if self.train.precision == "bf16" else 4)

    @property
    def resolved_nvshmem_buffer_gb(self) -> float:
        """cad.nvshmem_buffer_gb, with 0 resolved."""
        if self.cad.nvshmem_buffer_gb:
            return self.cad.nvshmem_buffer_gb
        resend = self.resolved_backward == "resend"
        shape, sinks = self.attention_shape, self.model.sinks
        return receive_buffer_gb(shape, self.data.tokens_per_rank, resend=resend, sinks=sinks)

    @property
    def resolved_warmup_steps(self) -> int:
        """optimizer.warmup_steps, with null resolved for a run that does not resume."""
        given = self.optimizer.warmup_steps
        return min(self.train.steps // 6, 100) if given is None else given

    @property
    def resolved_decay_steps(self) -> int:
        """optimizer.decay_steps, with null resolved."""
        given = self.optimizer.decay_steps
        return max(self.train.steps // 10, 1) if given is None else given

    @property
    def resolved_recompute(self) -> Literal["none", "mlp", "all"]:
        """train.recompute, with auto as on devices without a limit."""
        if self.train.recompute == "auto":
            return "all" if self.train.offload == "all" else "none"
        return self.train.recompute

    @property
    def resolved_backward(self) -> Literal["keep", "resend"]:
        """cad.backward, with auto as on devices without a limit."""
        if self.cad.backward == "auto":
            return "resend" if self.parallel.pp > 1 or self.train.offload == "all" else "keep"
        return self.cad.backward
