"""Errors for requests that the simulator cannot predict."""

from distca.errors import OptionError


class SimulationError(OptionError):
    """A cluster, a model or a workload that no step can be predicted for."""
