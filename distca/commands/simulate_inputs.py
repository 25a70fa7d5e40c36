"""What ``distca simulate`` reads: the model's shape, the costs of its attention, and the documents."""

from __future__ import annotations

from pathlib import Path

from distca.commands.lengths import MOST_TOKENS, read_data, read_lengths
from distca.data.mixes import MIX_NAMES, sample_mix
from distca.errors import OptionError
from distca.plan import CostModel, analytic_cost
from distca.plan.cost.table_file import find_table, open_table
from distca.simulate import MODELS, Job, Model, Workload
from distca.simulate.kernel_rate import at_rate


def read_model(name: str) -> Model:
    """A shape by name, or that of a configuration file.

    Raises:
        OptionError: there is no such name or file, or it has no model.
    """
    if name in MODELS:
        return MODELS[name]
    import yaml

    wanted = ("layers", "hidden", "ffn", "heads", "kv_heads")
    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))["model"]
        sizes = {key: int(content[key]) for key in wanted}
        head_dim = int(content.get("head_dim") or sizes["hidden"] // sizes["heads"])
        vocabulary, tied = int(content.get("vocabulary") or 128_256), bool(content.get("tie_embeddings"))
        return Model(**sizes, head_dim=head_dim, vocabulary=vocabulary, tied=tied)
    except OSError:
        raise OptionError(
            f"--model is {name!r}; give {', '.join(MODELS)} or a configuration file, such as configs/llama-8b.yaml."
        ) from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError, ArithmeticError):
        raise OptionError(f"--model {name} has no model with {', '.join(wanted)}; give another file.") from None


def read_costs(shape: Model, tp: int, cost_table: str | None, tflops: float | None) -> CostModel:
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
    part = shape.shape(tp)
    heads = (part.heads, part.kv_heads, part.head_dim)
    cost: CostModel | None
    if cost_table:
        cost = open_table(cost_table, *heads)
    else:
        cost = find_table("NVIDIA H200", "flash4", *heads) or analytic_cost(*heads)
    return cost if tflops is None else at_rate(cost, tflops)


def draw(lengths: str, job: Job, context: int, seed: int, steps: int) -> list[Workload]:
    """The documents of every step.

    Raises:
        OptionError: more tokens than a simulation takes, or documents that do not fit.
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
        documents = sample_mix(lengths, tokens, seed, context=context)
    elif documents is None:
        documents = read_lengths(lengths, tokens=tokens, seed=seed)
    common = (context, job.data_parallel, job.tokens_per_rank, job.micro_batches, seed)
    return [Workload.draw(documents, *common, skip=step) for step in range(steps)]
