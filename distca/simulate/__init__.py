"""Predicts the time and memory of a training step, with numpy only; ``distca simulate`` uses it.

It makes the step's plan with this project's planner, and runs the plan on simulated streams and links.
"""

from distca.errors import SimulationError
from distca.simulate.cluster import Cluster
from distca.simulate.job import Job
from distca.simulate.model import MODELS, dense
from distca.simulate.prediction import Prediction
from distca.simulate.rates import Rates, load_rates
from distca.simulate.simulation import simulate
from distca.simulate.workload import Workload

__all__ = [
    "MODELS",
    "Cluster",
    "Job",
    "Prediction",
    "Rates",
    "SimulationError",
    "Workload",
    "dense",
    "load_rates",
    "simulate",
]
