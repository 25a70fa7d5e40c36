"""The planner decides, from document lengths, which rank holds each token and which rank computes its attention.

- A layout says which rank holds each token, and in which row of the rank's tensors.
- A plan says which rank computes each *task*, a range of a document's query rows.
- A route says which rows of q, k and v one rank sends and receives, and which k,v rows this rank's tasks read.
"""

from distca.errors import PlanError
from distca.plan.cost.analytic import analytic_cost, area_cost
from distca.plan.cost.model import AttentionShape, CostModel, Direction
from distca.plan.cost.table import TableCost
from distca.plan.cost.table_file import load_table
from distca.plan.exchanges import RowExchange, Segments
from distca.plan.kinds import AttentionKind
from distca.plan.layout import Layout, Shards
from distca.plan.metrics import PairRows, Traffic, context_rows, imbalance, makespan_bound, server_seconds, traffic
from distca.plan.micro_batch import Bytes, MicroBatchPlan, NanoPlan, plan_micro_batch
from distca.plan.network import Links
from distca.plan.options import PlanOptions
from distca.plan.place.lay_out import lay_out
from distca.plan.place.micro_batches import deal_over_micro_batches
from distca.plan.plan import Plan, plan_at_home
from distca.plan.routes import Route, Routes, route
from distca.plan.scheduler.scheduler import DEFAULT_TOLERANCE, schedule, training_tolerance
from distca.plan.step import StepPlan, plan_step
from distca.plan.tasks import Tasks

__all__ = [
    "DEFAULT_TOLERANCE",
    "AttentionKind",
    "AttentionShape",
    "Bytes",
    "CostModel",
    "Direction",
    "Layout",
    "Links",
    "MicroBatchPlan",
    "NanoPlan",
    "PairRows",
    "Plan",
    "PlanError",
    "PlanOptions",
    "Route",
    "Routes",
    "RowExchange",
    "Segments",
    "Shards",
    "StepPlan",
    "TableCost",
    "Tasks",
    "Traffic",
    "analytic_cost",
    "area_cost",
    "context_rows",
    "deal_over_micro_batches",
    "imbalance",
    "lay_out",
    "load_table",
    "makespan_bound",
    "plan_at_home",
    "plan_micro_batch",
    "plan_step",
    "route",
    "schedule",
    "server_seconds",
    "traffic",
    "training_tolerance",
]
