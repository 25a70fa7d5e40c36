"""Documents → layout → plan → routes. numpy only: runs anywhere, imports no torch."""

from distca.plan.balance import Traffic, imbalance, server_seconds, traffic
from distca.plan.bounds import makespan_bound
from distca.plan.cost import AttentionShape, CostModel, Direction, analytic_cost, area_cost
from distca.plan.errors import PlanError
from distca.plan.layout import Layout, Shards, lay_out
from distca.plan.links import Links
from distca.plan.micro_batch import Bytes, MicroBatchPlan, NanoPlan, plan_micro_batch
from distca.plan.plan import Plan, Tasks, plan_at_home
from distca.plan.routes import Route, RowExchange, Segments, route
from distca.plan.scheduler import DEFAULT_TOLERANCE, schedule, training_tolerance
from distca.plan.table_cost import TableCost, load_table

__all__ = [
    "DEFAULT_TOLERANCE",
    "AttentionShape",
    "Bytes",
    "CostModel",
    "Direction",
    "Layout",
    "Links",
    "MicroBatchPlan",
    "NanoPlan",
    "Plan",
    "PlanError",
    "Route",
    "RowExchange",
    "Segments",
    "Shards",
    "TableCost",
    "Tasks",
    "Traffic",
    "analytic_cost",
    "area_cost",
    "imbalance",
    "lay_out",
    "load_table",
    "makespan_bound",
    "plan_at_home",
    "plan_micro_batch",
    "route",
    "schedule",
    "server_seconds",
    "traffic",
    "training_tolerance",
]
