"""The inputs of ``distca simulate``: the model's shape, the costs of its attention, and the documents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from distca.commands.lengths import MOST_TOKENS, read_data, read_lengths
from distca.data.mixes import MIX_NAMES, sample_documents
from distca.errors import OptionError
from distca.models.beside_latent import not_with_latent
from distca.models.experts import Experts
from distca.models.hybrid import EXPERTS, Hybrid
from distca.models.latent import Latent
from distca.models.shape import ModelShape
from distca.models.variant import Variant
from distca.plan import CostModel, analytic_cost
from distca.plan.cost.table_file import find_table, open_table
from distca.simulate import MODELS, Job, Workload, dense
from distca.simulate.kernel_rate import at_rate
from distca.simulate.model import heads_of_rank
from distca.yaml_file import read_yaml

_MOST_SIZE = 2**31 - 1
_FLAGS = ("tie_embeddings", "qk_norm", "sinks")
_MORE: dict[str, Any] = {**dict.fromkeys(_FLAGS, False), "layer_types": ["full"], "window": 0}
_GROUPS: dict[str, Any] = {"experts": Experts, "latent": Latent, "hybrid": Hybrid, "variant": Variant}


def read_model(name: str) -> ModelShape:
    """A shape by name, or that of a configuration file.

    Raises:
        OptionError: there is no such name or file, or it has no model, or one of sizes that cannot be.
    """
    if name in MODELS:
        return MODELS[name]
    wanted = ("layers", "hidden", "ffn", "heads", "kv_heads")
    try:
        content = read_yaml(Path(name), OptionError)["model"]
        sizes = {key: content[key] for key in wanted}
        sizes |= {key: content[key] for key in ("head_dim", "vocabulary") if content.get(key)}
        more = {key: content.get(key, unset) for key, unset in _MORE.items()}
        groups = {group: dict(content.get(group) or {}) for group in _GROUPS}
    except OSError:
        raise OptionError(
            f"--model is {name!r}; give {', '.join(MODELS)} or a configuration file, such as configs/llama-8b.yaml."
        ) from None
    except OptionError as error:
        raise OptionError(f"--model: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise OptionError(f"--model {name} has no model with {', '.join(wanted)}; give another file.") from None
    for key, value in sizes.items():
        if type(value) is not int or not 1 <= value <= _MOST_SIZE:
            raise OptionError(f"--model {name} has {key} {value!r}; it must be a whole number from 1 to {_MOST_SIZE}.")
    for key in _FLAGS:
        if not isinstance(more[key], bool):
            raise OptionError(f"--model {name} has {key} {more[key]!r}; it must be true or false.")
    has_latent = bool(groups["latent"].get("kv_rank"))  # a run's own config.yaml has the group in any case
    if not has_latent and "head_dim" not in sizes and sizes["hidden"] % sizes["heads"]:
        raise OptionError(
            f"--model {name} has hidden {sizes['hidden']}, which is not divisible by heads {sizes['heads']}; change "
            "one or give head_dim."
        )
    head_dim = {"head_dim": 0 if has_latent else sizes["hidden"] // sizes["heads"]}
    _check_windows(name, more["layer_types"], more["window"])
    for group, kind in _GROUPS.items():
        _check_fields(name, group, groups[group], asdict(kind()))
    own, attention, stack = Experts(**groups["experts"]), Latent(**groups["latent"]), Hybrid(**groups["hybrid"])
    variant = Variant(**groups["variant"])
    wrong = [f"experts that cannot be: {each}" for each in own.problems(sizes["layers"])]
    wrong += [f"latent attention that cannot be: {each}" for each in attention.problems()]
    wrong += [f"a hybrid stack that cannot be: its {each}" for each in stack.problems(sizes["layers"])]
    wrong += _not_in_stack(stack, own, more["window"])
    if has_latent and sizes["kv_heads"] != sizes["heads"]:
        wrong.append(
            f"latent attention and kv_heads {sizes['kv_heads']}, but every head has keys; set it to {sizes['heads']}."
        )
    wrong += [f"a variant that cannot be: its {each}" for each in variant.problems(sizes["layers"])]
    if wrong:
        raise OptionError(f"--model {name} has {wrong[0]}")
    shape = dense(**head_dim | sizes, **more, experts=own, latent=attention, hybrid=stack, variant=variant)
    for unserved in not_with_latent(shape):
        raise OptionError(f"--model {name} cannot be trained: its {unserved}")
    return shape


def _not_in_stack(stack: Hybrid, own: Experts, window: int) -> list[str]:
    """Returns what a hybrid stack would pass over, as a run with these settings refuses it."""
    if not stack.pattern:
        return []
    found = []
    if (EXPERTS in stack.pattern) != bool(own.count):
        found.append(
            f"experts with count {own.count} and a hybrid pattern {stack.pattern!r}; give experts where it has E, and "
            "none where it has not."
        )
    for key, value in (("window", window), ("experts.dense_layers", own.dense_layers)):
        if value:
            found.append(f"{key} {value}, which is not served with a hybrid pattern; leave it out.")
    return found


def _check_fields(name: str, group: str, given: dict[Any, Any], usual: dict[str, Any]) -> None:
    """Refuse fields of a group in a model's file that a run's settings do not have, or of a wrong type.

    Raises:
        OptionError: naming the first one.
    """
    for key, value in given.items():
        if key not in usual:
            raise OptionError(f"--model {name} has {group} with {key!r}; known are {', '.join(usual)}.")
        kinds = (int, float) if isinstance(usual[key], float) else (type(usual[key]),)
        numbers = value if isinstance(value, list) else [value] if isinstance(value, int | float) else []
        of_numbers = all(isinstance(each, int | float) and 0 <= each <= _MOST_SIZE for each in numbers)
        if type(value) not in kinds or not of_numbers:
            raise OptionError(
                f"--model {name} has {group} with {key} {value!r}; it must be such as {usual[key]!r}, and not negative."
            )


def _check_windows(name: str, types: Any, window: Any) -> None:
    """Refuse layers with windows that a run with these settings would not have.

    Raises:
        OptionError: they are no types and no window, or lack one.
    """
    if not isinstance(types, list) or not types or not set(map(str, types)) <= {"full", "window"}:
        raise OptionError(f"--model {name} has layer_types {types!r}; it must be a list of full and window.")
    if type(window) is not int or not 0 <= window <= _MOST_SIZE or (window > 0) != ("window" in types):
        raise OptionError(
            f"--model {name} has window {window!r} with layer_types {types}; it must be a whole number of 1 or more "
            "where there are layers of type window, else 0."
        )


def read_costs(shape: ModelShape, tp: int, cost_table: str | None, tflops: float | None) -> CostModel:
    """Seconds per CA-task for the heads of a tensor-parallel rank.

    Args:
        shape: of the model.
        tp: tensor-parallel ranks.
        cost_table: a file with measured costs; by default the table of the H200, or where none fits the analytic model.
        tflops: rate of a long document's forward that they are scaled to; None leaves them.

    Raises:
        SimulationError: ``tp`` does not divide the heads, or the rate is not above 0.
        PlanError: the table is unusable, or one of other heads.
    """
    part = heads_of_rank(shape, tp)
    heads = (part.heads, part.kv_heads, part.head_dim)
    cost: CostModel | None
    if cost_table is not None:
        cost = open_table(cost_table, *heads, part.value_dim, part.value_bytes)
    else:
        found = find_table("NVIDIA H200", "flash4", *heads, value_dim=part.value_dim)
        cost = found or analytic_cost(*heads, value_dim=part.value_dim)
    return cost if tflops is None else at_rate(cost, tflops)


def draw(lengths: str, job: Job, context: int, seed: int, steps: int) -> list[Workload]:
    """The documents of every step.

    Raises:
        OptionError: more tokens than a simulation takes.
        SimulationError: the job's ranks cannot hold a document.
        PlanError, MixError: on lengths that cannot be read or drawn.
    """
    tokens = 2 * steps * job.micro_batches * job.data_parallel * job.tokens_per_rank
    if tokens > MOST_TOKENS:
        raise OptionError(
            f"Steps × micro-batches × ranks are {steps} × {job.micro_batches} × {job.data_parallel}, which "
            f"draw {tokens:,} tokens, more than {MOST_TOKENS:,}; lower --steps, --micro_batches or --tokens_per_rank."
        )
    documents = read_data(lengths, longest=context, seed=seed)
    if lengths in MIX_NAMES:
        documents = sample_documents(lengths, tokens, seed, context=context)
    elif documents is None:
        documents = read_lengths(lengths, tokens=tokens, seed=seed)
    common = (context, job.data_parallel, job.tokens_per_rank, job.micro_batches, seed)
    return [Workload.draw(documents, *common, skip=step) for step in range(steps)]
