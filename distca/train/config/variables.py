"""The environment variables of ``pretrain_llama.sh``, ``run3d.sh`` and ``run4d.sh``, in one table.

``distca.train.config.environment`` reads them and refuses what looks like one of them; ``--help`` of the scripts and
docs/environment.md show them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Launcher(Enum):
    """The script that reads the environment."""

    TRAINING = "pretrain_llama.sh"
    RUN_3D = "benchmarks/example-3d-parallel/run3d.sh"
    RUN_4D = "benchmarks/example-4d-parallel/run4d.sh"


@dataclass(frozen=True)
class Values:
    """The values that a variable may have: a regular expression for all of it, and words for that."""

    pattern: str
    words: str


COUNT = Values("[1-9][0-9]{0,8}", "a whole number from 1 to 999999999")
_COUNT_FROM_0 = Values("0|[1-9][0-9]{0,8}", "a whole number from 0 to 999999999")
_AT_LEAST_1 = Values("[1-9][0-9]*", "a whole number of at least 1")
_FROM_0 = Values("0|[1-9][0-9]*", "a whole number of at least 0")
_PORT = Values(
    "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]",
    "a whole number from 1 to 65535",
)
_SWITCH = Values("0|1", "0 or 1")
_TEXT = Values(".*", "text")
_MODE = (
    "(distca|distca-unsplit|packed|packed-dealt|variable|(cp|ring|ulysses)[0-9]*|cp[0-9]*-(keep|halo)"
    "|megatron-te|megatron-te[0-9]*-(p2p|a2a))"
)


def _one_of(*words: str) -> Values:
    return Values("|".join(map(re.escape, words)), " or ".join([", ".join(words[:-1]), words[-1]]))


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name.
        values: what it may be.
        default: what holds where it is not given, in words.
        meaning: in one line.
        training: what it sets in training: dotted settings, and options that the launcher makes, which begin with
            dashes; empty where the launcher itself reads it; None where training does not take it.
        benchmarks: the same for run3d.sh and run4d.sh.
        stages: among the benchmarks only run4d.sh takes it.
        listed: the benchmarks take several of its values, with spaces.
        instead: what to do in a launcher that does not take it, with {value} in it; by default to append its setting.
        also: what the same is called elsewhere, and so would be tried.
    """

    name: str
    values: Values
    default: str
    meaning: str
    training: tuple[str, ...] | None = ()
    benchmarks: tuple[str, ...] | None = ()
    stages: bool = False
    listed: bool = False
    instead: str = ""
    also: tuple[str, ...] = ()

    def sets(self, launcher: Launcher) -> tuple[str, ...] | None:
        """Returns the settings that it sets in ``launcher``; None where that does not take it."""
        if launcher is Launcher.TRAINING:
            return self.training
        return None if self.stages and launcher is Launcher.RUN_3D else self.benchmarks

    def allowed(self, launcher: Launcher) -> Values:
        """Returns the values that ``launcher`` takes for it."""
        if not self.listed or launcher is Launcher.TRAINING:
            return self.values
        one, words = self.values.pattern, self.values.words
        return Values(f"({one})( ({one}))*", f"{words}, or several with spaces between")

    def written(self, value: str) -> str:
        """A value as a setting has it."""
        return {"0": "false", "1": "true"}[value] if self.values is _SWITCH else value


_CONFIGURATION = "the configuration's"
VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="MODEL",
        values=_one_of("tiny", "8b", "8b-cut", "34b"),
        default="tiny on CPUs; on GPUs 8b-cut, benchmarks 8b",
        meaning="the model's configuration in configs/",
        training=("--config",),
        also=("MODEL_NAME",),
    ),
    Variable(
        name="CONFIG",
        values=_TEXT,
        default="by MODEL",
        meaning="a YAML file of settings, instead of MODEL",
        training=("--config",),
        benchmarks=None,
        instead="append --config {value}, whose settings win over MODEL's",
        also=("CONFIG_FILE", "CONFIG_PATH"),
    ),
    Variable(
        name="INIT_FROM",
        values=_TEXT,
        default="weights drawn anew",
        meaning="a Hugging Face folder to begin with, instead of MODEL",
        training=("checkpoint.init_from",),
        benchmarks=None,
        instead="let weights be drawn anew without it",
        also=("HF_MODEL", "INIT_CHECKPOINT"),
    ),
    Variable(
        name="NAME",
        values=Values("[^/]*[^/.][^/]*", "a folder's name without slashes"),
        default=f"{_CONFIGURATION}; benchmarks: date and time",
        meaning="name of the run and its folder in runs/, of a benchmark in logs/",
        training=("name",),
        also=("RUN_NAME", "EXPERIMENT"),
    ),
    Variable(
        name="RESUME",
        values=_TEXT,
        default="a new run; in a requeued Slurm job auto where NAME is given, else job",
        meaning="folder of a run to go on with, or latest, job or auto",
        training=("checkpoint.resume",),
        benchmarks=None,
        instead="let every mode begin anew without it",
    ),
    Variable(
        name="NNODES",
        values=COUNT,
        default="1, or all nodes of the Slurm job",
        meaning="machines",
        also=("NUM_NODES", "NODE_COUNT"),
    ),
    Variable(
        name="GPUS_PER_NODE",
        values=_COUNT_FROM_0,
        default="all that are there",
        meaning="GPUs of a machine, a rank each; 0 takes four CPU ranks",
        also=("NGPUS", "NUM_GPUS", "NPROC_PER_NODE"),
    ),
    Variable(
        name="SERVERS",
        values=COUNT,
        default="none",
        meaning="servers without a model: the last GPUs, or more CPU processes",
        training=("cad.servers",),
        benchmarks=None,
        instead="compare modes without it",
        also=("NUM_SERVERS", "ATTENTION_SERVERS"),
    ),
    Variable(
        name="SERVERS_PER_GPU",
        values=COUNT,
        default="1",
        meaning="servers that share a GPU, at most TP_SIZE",
        benchmarks=None,
        instead="compare modes without it",
    ),
    Variable(
        name="MASTER_ADDR",
        values=_TEXT,
        default="the Slurm job's first node",
        meaning="with several machines: address of the first one",
    ),
    Variable(
        name="NODE_RANK",
        values=_COUNT_FROM_0,
        default="Slurm's",
        meaning="with several machines without Slurm: number of this one",
    ),
    Variable(
        name="MASTER_PORT",
        values=_PORT,
        default="29500, or by the Slurm job's number",
        meaning="port on the first machine where ranks meet",
    ),
    Variable(
        name="TP_SIZE",
        values=COUNT,
        default=f"{_CONFIGURATION}; benchmarks: 1",
        meaning="tensor-parallel ranks",
        training=("parallel.tp",),
        benchmarks=("parallel.tp",),
        also=("TENSOR_PARALLEL_SIZE",),
    ),
    Variable(
        name="PP_SIZE",
        values=COUNT,
        default=f"{_CONFIGURATION}; benchmarks: 2",
        meaning="pipeline stages; they divide the layers",
        training=("parallel.pp",),
        benchmarks=("parallel.pp",),
        stages=True,
        instead=f"use {Launcher.RUN_4D.value}",
        also=("PIPELINE_PARALLEL_SIZE",),
    ),
    Variable(
        name="EP_SIZE",
        values=COUNT,
        default=_CONFIGURATION,
        meaning="expert-parallel ranks, in models with experts",
        training=("parallel.ep",),
        benchmarks=("parallel.ep",),
        also=("EXPERT_PARALLEL_SIZE",),
    ),
    Variable(
        name="CP_SIZE",
        values=COUNT,
        default="with MODE=all every size, else all data-parallel ranks",
        meaning="ranks of a context-parallel group, in modes that have one",
        training=None,
        benchmarks=("--modes", "--degree"),
        instead="let DistCA balance attention over all data-parallel ranks without it",
        also=("CONTEXT_PARALLEL_SIZE",),
    ),
    Variable(
        name="STEPS",
        values=_AT_LEAST_1,
        default=_CONFIGURATION,
        meaning="optimizer steps",
        training=("train.steps",),
        benchmarks=None,
        instead="rename it to BATCHES",
        also=("TRAIN_ITERS", "ITERS"),
    ),
    Variable(
        name="BATCHES",
        values=_AT_LEAST_1,
        default="30; on CPUs 4",
        meaning="measured global batches",
        training=None,
        benchmarks=("--batches",),
        instead="rename it to STEPS",
    ),
    Variable(
        name="WARM_UP",
        values=_FROM_0,
        default="3",
        meaning="global batches before the measured ones",
        training=None,
        benchmarks=("--warm-up",),
        instead="append --optimizer.warmup_steps {value}",
    ),
    Variable(
        name="MICRO_BATCHES",
        values=_AT_LEAST_1,
        default=f"{_CONFIGURATION}; benchmarks: 1, with stages 4",
        meaning="micro-batches per step",
        training=("train.micro_batches",),
        benchmarks=("train.micro_batches",),
    ),
    Variable(
        name="CONTEXT_LENGTH",
        values=_AT_LEAST_1,
        default=f"{_CONFIGURATION}; benchmarks: 131072, on CPUs 512",
        meaning="most tokens of a document",
        training=("data.context_length",),
        benchmarks=("--contexts",),
        listed=True,
        also=("SEQ_LEN", "SEQ_LENGTH", "MAX_SEQ_LEN", "CTX_LENGTH"),
    ),
    Variable(
        name="TOKENS_PER_RANK",
        values=_AT_LEAST_1,
        default=f"{_CONFIGURATION}; benchmarks: 131072, on CPUs 512",
        meaning="tokens per data-parallel rank and micro-batch",
        training=("data.tokens_per_rank",),
        benchmarks=("data.tokens_per_rank",),
        also=("NUM_TOKENS", "TOKENS", "TOKENS_PER_GPU"),
    ),
    Variable(
        name="DATA_SOURCE",
        values=_one_of("stdlib", "text", "jsonl", "parquet", "arrow", "blend", "indexed", "mix"),
        default=_CONFIGURATION,
        meaning="where documents come from",
        training=("data.source",),
        benchmarks=None,
        instead="choose the documents' lengths with MIX",
    ),
    Variable(
        name="DATA_PATH",
        values=_TEXT,
        default=_CONFIGURATION,
        meaning="file, folder, .bin/.idx prefix, a blend's YAML file, or name of a mix",
        training=("data.path",),
        benchmarks=None,
        instead="choose the documents' lengths with MIX",
        also=("DATA_DIR", "DATASET_PATH"),
    ),
    Variable(
        name="MIX",
        values=_one_of("pretrain", "prolong"),
        default="both",
        meaning="mix of document lengths, in its long-context version",
        training=None,
        benchmarks=("--mixes",),
        listed=True,
        instead="set DATA_SOURCE=mix and DATA_PATH to pretrain or prolong",
        also=("DATASET",),
    ),
    Variable(
        name="SEED",
        values=_FROM_0,
        default=_CONFIGURATION,
        meaning="of the weights and of the order of documents",
        training=("train.seed", "data.seed"),
        benchmarks=("train.seed", "data.seed"),
    ),
    Variable(
        name="LAYERS",
        values=_AT_LEAST_1,
        default="4; on CPUs 2",
        meaning="layers of the model",
        training=None,
        benchmarks=("model.layers",),
    ),
    Variable(
        name="RECOMPUTE",
        values=_one_of("none", "mlp", "all", "auto"),
        default="none",
        meaning="what backward computes again; auto: as much as a mode needs",
        training=None,
        benchmarks=("train.recompute",),
    ),
    Variable(
        name="MODE",
        values=Values(
            f"all|{_MODE}( {_MODE})*",
            "all, or, with spaces between, some of distca, distca-unsplit, packed, packed-dealt, variable, cp, "
            "cp-keep, cp-halo, ring, ulysses, megatron-te, megatron-te-p2p, megatron-te-a2a",
        ),
        default="all; with stages distca and packed",
        meaning="modes to compare",
        training=None,
        benchmarks=("--modes",),
        instead=f"set CAD to 1 (distca) or 0 (packed), use {Launcher.RUN_3D.value} for others",
        also=("METHOD",),
    ),
    Variable(
        name="CAD",
        values=_SWITCH,
        default=_CONFIGURATION,
        meaning="1 balances attention over ranks, 0 computes it at home",
        training=("cad.enabled",),
        benchmarks=None,
        instead="choose distca (balanced attention) or packed (attention at home) with MODE",
    ),
    Variable(
        name="PING_PONG",
        values=_SWITCH,
        default=_CONFIGURATION,
        meaning="1 hides transfers behind the other nano-batch's compute",
        training=("cad.ping_pong",),
        benchmarks=None,
    ),
    Variable(
        name="BACKWARD",
        values=_one_of("auto", "keep", "resend"),
        default=_CONFIGURATION,
        meaning="keep moves fewest bytes, resend holds equal memory",
        training=("cad.backward",),
        benchmarks=None,
    ),
    Variable(
        name="EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB",
        values=Values("[0-9]*[.]?[0-9]+", "a number of GiB"),
        default="by data.tokens_per_rank",
        meaning="GiB per rank for rows that arrive by NVSHMEM",
        training=("cad.nvshmem_buffer_gb",),
        benchmarks=None,
    ),
    Variable(
        name="EXPERIMENT_LOG_MEMORY_USAGE",
        values=_SWITCH,
        default=_CONFIGURATION,
        meaning="1 records the memory of CPU ranks after each step",
        training=("log.memory",),
        benchmarks=None,
        instead="read peak memory in table.md, where it always is",
    ),
    Variable(
        name="ENABLE_NSYS",
        values=_SWITCH,
        default="0",
        meaning="1 runs under Nsight Systems, with reports in runs/nsys/",
        benchmarks=None,
        instead=f"use it with {Launcher.TRAINING.value}",
        also=("ENABLE_NSIGHT",),
    ),
    Variable(
        name="DRY_RUN",
        values=_SWITCH,
        default="0",
        meaning="1 checks the settings, prints the command and starts nothing",
    ),
)
