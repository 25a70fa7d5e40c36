"""Refuse a run that cannot work, before anything is started, and name everything that is wrong at once."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

from distca.errors import ConfigError, PlanError
from distca.plan.cost.table_file import load_table, open_table
from distca.sizes.fp8_shapes import unfit_widths
from distca.train.config.cli import changed, known_settings, value_of
from distca.train.config.names import with_settings
from distca.train.config.schema import LARGEST_NARROW_BETA2, MEASURE, RESUME_BY_NAME, RunConfig
from distca.train.config.validate_data import data_problems
from distca.train.config.validate_models import expert_ranks_problems, model_problems
from distca.train.config.validate_servers import servers_problems
from distca.words import count

_AT_LEAST_ONE = (
    "model.layers",
    "model.hidden",
    "model.ffn",
    "model.heads",
    "model.kv_heads",
    "parallel.tp",
    "parallel.pp",
    "parallel.ep",
    "data.context_length",
    "data.tokens_per_rank",
    "train.steps",
    "train.micro_batches",
    "train.validate_batches",
    "checkpoint.keep",
    "log.every",
)
_ABOVE_ZERO = ("optimizer.lr", "optimizer.epsilon", "model.rope_base", "model.norm_epsilon")
_SEEDS = ("train.seed", "data.seed")
_LARGEST, _LARGEST_SEED = 2**31 - 1, 2**63 - 1
"""Rows are counted in 32 bits by the kernels, seeds in 64."""
_LONGEST_NAME = 200
_ON_CPUS: dict[str, tuple[object, ...]] = {
    "train.fp8": ("none",),
    "train.fp8_weights": (False,),
    "train.linears": ("auto", "local"),
    "train.moments": ("float32",),
    "cad.kernel": ("auto", "reference"),
    "cad.transport": ("auto", "gloo"),
}
"""Values that CPU ranks take, first the one that is advised; others need GPUs."""
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2", "data.validation_fraction", "cad.tolerance")


def validate(config: RunConfig, world_size: int, vocabulary: int | None = None, on_cpus: bool = False) -> None:
    """Check everything that needs no process group and no data.

    Args:
        config: the run.
        world_size: ranks it is started with.
        vocabulary: tokens that the data uses, where it is known already.
        on_cpus: these ranks run on CPUs; otherwise nothing is known of their devices.

    Raises:
        ConfigError: one sentence per problem, with the value, the limit and the setting; those of single numbers first.
    """
    problems = _ranges(config)
    # The checks below divide by sizes, so they wait until sizes are positive.
    if not problems:
        needing = _needing_gpus(config) if on_cpus else {}
        config = changed(config, [(setting, _ON_CPUS[setting][0]) for setting in needing])  # they are said once
        problems = (
            list(needing.values())
            + model_problems(config, vocabulary)
            + _kernel(config)
            + _fp8(config)
            + _fewer_bytes(config)
            + _offload(config)
            + _keep_outputs(config)
            + (_world(config, world_size) or data_problems(config, world_size))
            + _steps(config)
            + _output(config)
        )
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n".join([f"{len(problems)} settings cannot work:"] + [f"  - {line}" for line in problems]))


def _ranges(config: RunConfig) -> list[str]:
    """Returns a sentence for each single number that is out of its range."""
    problems = []
    for setting in known_settings():
        value = value_of(config, setting)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            problems.append(f"{setting} is {value}; it must be a finite number.")
        elif setting in _AT_LEAST_ONE and value < 1:
            problems.append(f"{setting} is {value}; it must be at least 1.")
        elif setting in _ABOVE_ZERO and value <= 0:
            problems.append(f"{setting} is {value}; it must be above 0.")
        elif value < 0:
            problems.append(f"{setting} is {value}; it must not be negative.")
        elif setting in _BELOW_ONE and value >= 1:
            problems.append(f"{setting} is {value}; it must be below 1.")
        elif isinstance(value, int) and value > (most := _LARGEST_SEED if setting in _SEEDS else _LARGEST):
            problems.append(f"{setting} is {value}; it must be at most {most}.")
    if config.name in ("", "..") or Path(config.name).name != config.name:
        problems.append(f"name is {config.name!r}; it must be a folder's name without slashes; output says where.")
    elif len(os.fsencode(config.name)) > _LONGEST_NAME:
        problems.append(f"name has {len(os.fsencode(config.name))} bytes; it must have {_LONGEST_NAME} at most.")
    return problems


def _needing_gpus(config: RunConfig) -> dict[str, str]:
    """Sentences by setting."""
    values = {setting: value_of(config, setting) for setting in _ON_CPUS}
    return {
        setting: f"{setting} is {str(value).lower()}, which needs GPUs, but the ranks run on CPUs; set {setting} to "
        f"{str(_ON_CPUS[setting][0]).lower()}, or start them on GPUs."
        for setting, value in values.items()
        if value not in _ON_CPUS[setting]
    }


def _kernel(config: RunConfig) -> list[str]:
    kernel, problems = config.cad.kernel, []
    if config.train.precision == "fp32" and kernel in ("flash4", "torch"):
        problems.append(
            f"cad.kernel {kernel} computes in bf16, but train.precision is fp32; "
            "set cad.kernel to auto or reference, or train.precision to bf16."
        )
    if kernel == "torch" and config.cad.deterministic:
        problems.append(
            "cad.kernel torch has no deterministic backward; set cad.kernel to auto or cad.deterministic to false."
        )
    return problems


def _fewer_bytes(config: RunConfig) -> list[str]:
    """Gradients and moments in fewer bytes than float32's."""
    train, problems = config.train, []
    if train.gradients != "float32" and train.precision == "fp32":
        problems.append(
            f"train.gradients is {train.gradients}, but train.precision is fp32, whose gradients are float32 too; set "
            "train.precision to bf16 or train.gradients to float32."
        )
    if train.moments != "float32" and (train.precision == "fp32" or not config.optimizer.distributed):
        why = "train.precision is fp32" if train.precision == "fp32" else "optimizer.distributed is false"
        problems.append(
            f"train.moments is {train.moments}, but {why}; set train.moments to float32, or train.precision to bf16 "
            "and optimizer.distributed to true."
        )
    if train.moments != "float32" and config.optimizer.beta2 > LARGEST_NARROW_BETA2 and not train.evaluate:
        problems.append(
            f"train.moments is {train.moments}, but optimizer.beta2 is {config.optimizer.beta2:g}, with which a second "
            f"moment in it would stay as it is; lower beta2 to {LARGEST_NARROW_BETA2}, or set train.moments to float32."
        )
    return problems


def _offload(config: RunConfig) -> list[str]:
    """Returns a sentence for each setting that rows in host memory do not go with."""
    if config.train.offload != "all":
        return []
    needed: dict[str, tuple[object, object]] = {
        "cad.enabled": (config.cad.enabled, True),
        "train.recompute": (config.resolved_recompute, "all"),
        "cad.backward": (config.resolved_backward, "resend"),
        "parallel.pp": (config.parallel.pp, 1),
    }
    return [
        f"train.offload is all, but {name} is {str(found).lower()}; set it to {str(value).lower()}, or train.offload "
        "to none."
        for name, (found, value) in needed.items()
        if found != value
    ]


def _keep_outputs(config: RunConfig) -> list[str]:
    """Outputs of norms and SwiGLU, which are there to be kept where nothing else is computed again."""
    if config.train.keep_outputs != "all":
        return []
    needed = {"train.recompute": (config.resolved_recompute, "none"), "train.fp8": (config.train.fp8, "none")}
    return [
        f"train.keep_outputs is all, but {name} is {found}; set it to {value}, or train.keep_outputs to none."
        for name, (found, value) in needed.items()
        if found != value
    ]


def _fp8(config: RunConfig) -> list[str]:
    """Transformer Engine's linear layers, and their products in FP8."""
    train, model, tp = config.train, config.model, config.parallel.tp
    asked = f"train.fp8 is {train.fp8}" if train.fp8 != "none" else f"train.linears is {train.linears}"
    if train.precision == "fp32" and (train.fp8 != "none" or train.linears == "te"):
        return [
            f"{asked}, but Transformer Engine's linear layers compute in bf16 here, and train.precision is fp32; set "
            "train.precision to bf16."
        ]
    if train.fp8_weights and (train.fp8 == "none" or not config.optimizer.distributed):
        why = "train.fp8 is none" if train.fp8 == "none" else "optimizer.distributed is false"
        return [
            f"train.fp8_weights is true, but {why}; set train.fp8_weights to false, or train.fp8 to current, delayed "
            "or blockwise and optimizer.distributed to true."
        ]
    if train.fp8 == "none":
        return []
    if train.linears == "local":
        return [f"{asked}, but Megatron-Core's own linear layers know no FP8; set train.linears to auto or te."]
    unfit = unfit_widths(
        train.fp8,
        hidden=model.hidden,
        ffn=model.ffn,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.resolved_head_dim,
        tp=tp,
        shared=config.parallel.sequence_parallel and tp > 1,
    )
    return list(map(with_settings, unfit))


def _world(config: RunConfig, world_size: int) -> list[str]:
    tp, pp = config.parallel.tp, config.parallel.pp
    needs = f"parallel.tp {tp}" if pp == 1 else f"parallel.tp {tp} × parallel.pp {pp}"
    if world_size < tp * pp:
        return [
            f"The run has {count(world_size, 'rank')}, but {needs} needs at least {tp * pp}; start more or lower it."
        ]
    if world_size % (tp * pp):
        return [f"The {world_size} ranks are not divisible by {needs}; start another number of ranks or change it."]
    return _servers(config, world_size) + _stages(config) + expert_ranks_problems(config, world_size)


def _servers(config: RunConfig, world_size: int) -> list[str]:
    """Their nodes, the buffer for their rows, and the table that says what they take."""
    cad, problems = config.cad, servers_problems(config, world_size)
    servers = (world_size + config.cad.servers) // config.parallel.tp
    if cad.ranks_per_node and servers % cad.ranks_per_node:
        whose = count(world_size, "rank") + (f", cad.servers {cad.servers}" if cad.servers else "")
        problems.append(
            f"cad.ranks_per_node is {cad.ranks_per_node}, which does not divide the "
            f"{count(servers, 'attention server')} ({whose}, parallel.tp {config.parallel.tp}); "
            "give a divisor, or 0 for those of one machine."
        )
    if cad.enabled and cad.nvshmem_buffer_gb and cad.transport in ("nccl", "gloo"):
        problems.append(
            f"cad.nvshmem_buffer_gb is {cad.nvshmem_buffer_gb:g}, but cad.transport is {cad.transport}, which has no "
            "such buffer; set cad.transport to auto or nvshmem, or leave the buffer out."
        )
    return problems + _cost_table(config)


def _cost_table(config: RunConfig) -> list[str]:
    """Returns a sentence on a cost table that cannot be used with the heads of a tensor-parallel rank."""
    given, model, tp = config.cad.cost_table, config.model, config.parallel.tp
    if given in (None, "", MEASURE) or os.environ.get("RANK", "0") != "0":  # rank 0's is everyone's
        return []
    files = sorted(Path(given).glob("*.json")) if Path(given).is_dir() else [Path(given)]
    if not files or not files[0].is_file():
        return [
            f"cad.cost_table is {given}, which is not a file or a folder of JSON files; give what `distca profile` "
            f"wrote, or {MEASURE}, or leave it out."
        ]
    try:
        for file in files:
            load_table(file)
        if Path(given).is_dir():
            return []
        if not (model.heads % tp or model.kv_heads % tp):  # which is said elsewhere
            shape = model.attention_shape(tp)
            open_table(given, shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim)
    except PlanError as error:
        return [f"cad.cost_table is {given}, which cannot be used: {error}"]
    return []


def _stages(config: RunConfig) -> list[str]:
    pp, problems = config.parallel.pp, []
    problems += _stage_layers(config.model.layers, pp)
    if pp > 1 and config.cad.enabled and config.cad.backward == "keep":
        problems.append(
            f"cad.backward is keep, but with parallel.pp {pp} the server of a forward is busy with other phases by its "
            "backward; set cad.backward to auto or resend."
        )
    return problems


def _stage_layers(layers: int, pp: int) -> list[str]:
    if layers < pp:
        return [f"model.layers {layers} is less than parallel.pp {pp}, and every stage needs a layer; change one."]
    return [f"model.layers {layers} is not divisible by parallel.pp {pp}; change one."] if layers % pp else []


def _steps(config: RunConfig) -> list[str]:
    train, optimizer, problems = config.train, config.optimizer, []
    if config.resolved_warmup_steps >= train.steps:
        problems.append(
            f"optimizer.warmup_steps is {optimizer.warmup_steps}, but train.steps is {train.steps}; the warm-up must "
            "end before the run does: lower the first, or leave it out, or raise the second."
        )
    decay = config.resolved_decay_steps
    if optimizer.schedule == "wsd" and not 1 <= decay <= train.steps - config.resolved_warmup_steps:
        problems.append(
            f"optimizer.decay_steps is {decay}, but train.steps {train.steps} and a warm-up of "
            f"{config.resolved_warmup_steps} leave {train.steps - config.resolved_warmup_steps}; change one."
        )
    if optimizer.schedule != "wsd" and optimizer.decay_steps is not None:
        problems.append(
            f"optimizer.decay_steps is {optimizer.decay_steps}, but optimizer.schedule is {optimizer.schedule}, which "
            "has none; leave it out, or set optimizer.schedule to wsd."
        )
    if train.validate_every and not config.data.validation_fraction and not train.evaluate:
        problems.append(
            f"train.validate_every is {train.validate_every}, but data.validation_fraction is 0, which holds no "
            "document back to validate on; raise the second, or leave the first out."
        )
    if train.evaluate and not (config.checkpoint.init_from or config.checkpoint.resume):
        problems.append(
            "train.evaluate is true, but checkpoint.init_from and checkpoint.resume are both null, so there are no "
            "weights to evaluate; set one of them."
        )
    if train.evaluate and config.checkpoint.export:
        problems.append(
            f"train.evaluate is true, but checkpoint.export is {config.checkpoint.export}, and only a run that trains "
            "writes it; leave one out. `distca checkpoint export` writes what a run saved."
        )
    if optimizer.min_lr > optimizer.lr and optimizer.schedule != "constant":  # which has no use for it
        problems.append(f"optimizer.min_lr is {optimizer.min_lr}, above optimizer.lr {optimizer.lr}; lower it.")
    for name in ("timeline_steps", "profile_steps"):
        first, last = getattr(config.log, name) or (1, 1)
        if not 1 <= first <= last:
            problems.append(f"log.{name} is [{first}, {last}]; it must be [first, last] with 1 <= first <= last.")
    return problems


def _output(config: RunConfig) -> list[str]:
    """Whether the run can write where it will: into the run that it resumes, or below output."""
    resume = config.checkpoint.resume
    setting, folder = ("output", config.output) if resume in (None, *RESUME_BY_NAME) else ("checkpoint.resume", resume)
    nearest = Path(folder).absolute()
    if os.environ.get("RANK", "0") != "0":
        return []  # rank 0 writes
    try:
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        # Permissions alone do not say it: the file system may be read-only, or allow no new files even to root.
        with tempfile.TemporaryFile(dir=nearest):
            return []
    except OSError as error:
        return [f"{setting} is {folder}, but nothing can be written into {nearest} ({error.strerror}); change it."]
