"""The errors that a user sees as a sentence in place of a traceback: a base class, and a subclass for each subject.

A message names the value, the limit and what to change. The attribute ``next_step`` is a second sentence, on what to do
then.
"""

from __future__ import annotations


class DistcaError(ValueError):
    """The base class of these errors.

    Attributes:
        next_step: what the user can do, as the rest of the line "next step: ".
    """

    next_step = "correct what is named and start again."


class PlanError(DistcaError):
    """Documents, ranks or options for which there is no plan."""


class FailedPlanError(PlanError):
    """A step for which the planner failed with an unexpected error."""

    next_step = "report it with that file; to go on, resume without ping-pong or without dealing documents anew."


class DataError(DistcaError):
    """Data or data settings that cannot be used."""


class MixError(DistcaError):
    """A mix of document lengths, or a size, that cannot be sampled."""


class ModelError(DistcaError):
    """A model's folder that cannot be used, or holds a model that is not supported."""

    next_step = "give the folder of a model that is served, or correct what is named."


class KernelError(DistcaError):
    """A core-attention kernel that was asked for but cannot run here, or is wrong here."""


class TransportError(DistcaError):
    """A transport that was asked for but cannot be used here, or an exchange that does not fit its memory."""


class SupportError(DistcaError):
    """A model, or a way of running it, that core attention disaggregation does not support."""


class VersionError(DistcaError):
    """A needed package that is missing, or has a version that is not supported."""

    next_step = "install such a version into the environment that this runs in."


class ConfigError(DistcaError):
    """A setting with which no run can start."""

    next_step = "change the setting that is named and start again."

    def __init__(self, message: str, next_step: str | None = None) -> None:
        super().__init__(message)
        self.next_step = next_step or self.next_step


class LaunchError(ConfigError):
    """An environment, a machine or a Slurm job in which ranks cannot be started."""

    next_step = "change it and start again; docs/environment.md lists every variable."


class RefusedServerError(LaunchError):
    """A server without a model that cannot join a run; the run goes on without it."""


class OptionError(DistcaError):
    """An option of a command with a value that it cannot use."""

    next_step = "change the option that is named and start again."


class SimulationError(OptionError):
    """A cluster, a model or a workload that no step can be predicted for."""


class BaselineError(ConfigError):
    """A baseline, in a benchmark or a simulation, that cannot run with these documents, ranks or layers."""


class CheckpointError(DistcaError):
    """A checkpoint that could not be written; raised on every rank."""

    next_step = "make room or let the output folder be elsewhere; then resume from the last checkpoint before."


class DamagedCheckpointError(ConfigError):
    """A checkpoint whose files are not those that were saved."""

    next_step = "resume an older run, or start anew."


class StuckCheckpointError(DistcaError):
    """An old checkpoint that cannot be deleted."""

    next_step = "see above why; let this user write there, then start again."


class DivergedError(ConfigError):
    """A loss or gradient that is nan or infinite; raised on every rank before anything of the step is saved."""

    next_step = "lower the learning rate or warm up longer, and resume from the last checkpoint."


def system_words(error: OSError) -> str:
    """Returns the operating system's words on a file error, without the number and the path of Python's message."""
    # It occurs where a folder is to be made and a file is there; "File exists" alone would mislead.
    if isinstance(error, FileExistsError):
        return f"{error.filename} is no folder"
    return error.strerror or str(error)
