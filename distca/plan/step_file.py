"""Writes and reads JSON files with the inputs of a step's plan: document lengths and options, but no tokens.

If an unexpected error ends planning in a run, ``failed_plans.py`` writes such a file. ``distca plan`` reads it and
plans the step again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from distca.errors import PlanError
from distca.plan.cost.analytic import AnalyticCost
from distca.plan.cost.linear import LinearRate, NonAttention
from distca.plan.cost.model import AttentionShape, CostModel
from distca.plan.cost.pool import PoolCost
from distca.plan.cost.scaled import ScaledCost
from distca.plan.cost.table import LoadFactors, TableCost
from distca.plan.kinds import AttentionKind
from distca.plan.network import Links
from distca.plan.options import PlanOptions
from distca.plan.step import StepPlan, plan_step

_NAME = "distca_step"
_FORMAT = 5
"""The number of the file's format. It must grow with every change of what is written: other numbers are refused."""
_NOT_WRITTEN = {"scheduler"}
"""Options that are functions. A step that is read has their defaults."""
_OF_THEIR_OWN = {"cost", "costs", "links", "non_attention", "kinds", "layer_kinds"}
"""Options that are objects or lists. :func:`write_step` and :func:`read_step` convert each in its own way."""
_FACTORS = ("forward_factor", "backward_factor")
_PLAIN = [option.name for option in fields(PlanOptions) if option.name not in _OF_THEIR_OWN | _NOT_WRITTEN]
"""All other options: numbers, tuples of numbers, booleans and None."""


@dataclass(frozen=True)
class StepInputs:
    """The inputs of :func:`distca.plan.step.plan_step`.

    Attributes:
        lengths: for each micro-batch, tokens per document.
        homes: for each micro-batch, the rank of each document; None lets documents span ranks.
        room: the most tokens of each micro-batch, if documents may move to another micro-batch; else None.
    """

    lengths: Sequence[Sequence[int] | np.ndarray]
    options: PlanOptions
    homes: Sequence[Sequence[int] | np.ndarray | None] | None = None
    room: Sequence[int] | None = None

    def plan(self) -> StepPlan:
        """Plans the step.

        Raises:
            PlanError: the step cannot be planned (:func:`distca.plan.step.plan_step`).
        """
        return plan_step(self.lengths, self.options, self.homes, self.room)


def write_step(path: Path, inputs: StepInputs) -> None:
    """Writes a step's inputs to ``path``. Several processes may write the same file at once.

    Raises:
        OSError: the file cannot be written.
        TypeError: the options have a cost model of an unknown class, or another value that JSON cannot hold.
    """
    options = inputs.options
    content = {
        _NAME: _FORMAT,
        "lengths": [np.asarray(each).tolist() for each in inputs.lengths],
        "homes": [None if each is None else np.asarray(each).tolist() for each in inputs.homes or ()] or None,
        "room": None if inputs.room is None else list(inputs.room),
        "options": {name: getattr(options, name) for name in _PLAIN},
        "links": asdict(options.links),
        "non_attention": None if options.non_attention is None else asdict(options.non_attention),
        "kinds": [asdict(kind) for kind in options.kinds],
        "layer_kinds": options.layer_kinds,
        "cost": _cost_content(options.cost),
        "costs": [_cost_content(cost) for cost in options.costs],
    }
    # Process ids would not do: processes on different machines can have the same one.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    part.write_text(json.dumps(content, default=_as_python) + "\n", encoding="utf-8")
    part.replace(path)


def read_step(path: str | Path) -> StepInputs | None:
    """Returns the step's inputs in a file; None if the file cannot be read, is not JSON or is not a step's file.

    Raises:
        PlanError: the file is a step's file, but of another format, or changed, or damaged.
    """
    try:
        with open(path, encoding="utf-8") as file:
            if file.read(1) != "{":
                return None
            content = json.loads("{" + file.read())
    except (OSError, ValueError, RecursionError):
        return None
    if _NAME not in content:
        return None
    if content[_NAME] != _FORMAT:
        raise PlanError(
            f"The step in {path} is of format {content[_NAME]}, and this version of DistCA reads format {_FORMAT}; "
            "plan it with the version that wrote it."
        )
    try:
        options = {name: content["options"][name] for name in _PLAIN}
        options["server_gb_s"] = tuple(options["server_gb_s"])
        non_attention = content["non_attention"]
        return StepInputs(
            [np.asarray(each, np.int64) for each in content["lengths"]],
            PlanOptions(
                cost=_cost(content["cost"]),
                costs=tuple(_cost(each) for each in content["costs"]),
                kinds=tuple(AttentionKind(**each) for each in content["kinds"]),
                layer_kinds=tuple(tuple(int(kind) for kind in stage) for stage in content["layer_kinds"]),
                links=Links(**content["links"]),
                non_attention=None if non_attention is None else _non_attention(**non_attention),
                **options,
            ),
            content["homes"] and [None if each is None else np.asarray(each, np.int64) for each in content["homes"]],
            content["room"] and [int(each) for each in content["room"]],
        )
    except PlanError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(
            f"The step in {path} was changed or damaged ({error!r}); use the file as it was written."
        ) from None


def _non_attention(factors: Sequence[float], **seconds: float) -> NonAttention:
    return NonAttention(**seconds, factors=tuple(factors))


def _cost_content(cost: CostModel) -> dict[str, Any]:
    if isinstance(cost, AnalyticCost):
        return {"model": "analytic", **asdict(cost)}
    if isinstance(cost, PoolCost):
        return {
            "model": "pool",
            "tables": [_cost_content(table) for table in cost.tables],
            "of_server": list(cost.of_server),
        }
    if isinstance(cost, ScaledCost):
        factors = {name: getattr(cost, name) for name in _FACTORS}
        return {"model": "scaled", "measured": _cost_content(cost.measured), **factors}
    if not isinstance(cost, TableCost):
        raise TypeError(f"a {type(cost).__name__} cannot be written")
    return {
        "model": "table",
        "shape": asdict(cost.shape),
        **{name: _numbers(column) for name, column in cost.measured.items()},
        "block": cost.block,
        "load": cost.load and {name: _numbers(column) for name, column in vars(cost.load).items()},
        "linear": None if cost.linear is None else asdict(cost.linear),
        "window": cost.window,
    }


def _cost(content: Mapping[str, Any]) -> CostModel:
    given = dict(content)
    name = given.pop("model")
    if name == "pool":
        tables = tuple(_cost(table) for table in given["tables"])
        return PoolCost(tables, tuple(int(number) for number in given["of_server"]))
    if name == "scaled":
        return ScaledCost(_cost(given["measured"]), *(float(given[factor]) for factor in _FACTORS))
    model = {"analytic": AnalyticCost, "table": TableCost}[name]
    given["shape"] = AttentionShape(**given["shape"])
    given["linear"] = None if given["linear"] is None else LinearRate(**given["linear"])
    if model is AnalyticCost:
        return AnalyticCost(**given | {way: tuple(given[way]) for way in ("forward_terms", "backward_terms")})
    given |= {name: np.asarray(given[name], np.float64) for name in TableCost.COLUMNS}
    if given["load"] is not None:
        given["load"] = LoadFactors(**{name: np.asarray(each) for name, each in given["load"].items()})
    return TableCost(**given)


def _as_python(number: Any) -> Any:
    """Returns a numpy number as a number of Python, for ``json``."""
    if isinstance(number, np.generic):
        return number.item()
    raise TypeError(f"a {type(number).__name__} cannot be written")


def _numbers(column: Any) -> Any:
    """Returns an array as nested lists, with None for nan."""
    array = np.asarray(column, np.float64)
    if array.ndim > 1:
        return [_numbers(row) for row in array]
    return [None if np.isnan(number) else number for number in array.tolist()]
