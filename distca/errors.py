"""Errors that a user can make or run into, as sentences: one base class, one subclass a subject.

A message names the value, the limit and what to change; ``next_step`` says what to do then.
"""

from __future__ import annotations


class DistcaError(ValueError):
    """Base of all errors that end a command with a sentence instead of a traceback.

    Attributes:
        next_step: what to do about it.
    """

    next_step = "correct what is named and start again."


class PlanError(DistcaError):
    """Documents, ranks or options that no layout or plan can serve."""


class FailedPlanError(PlanError):
    """A step that the planner itself failed on, though its documents could have been planned."""

    next_step = "report it with that file; to go on, resume without ping-pong or without dealing documents anew."


class DataError(DistcaError):
    """Data or data settings that cannot be used."""


class MixError(DistcaError):
    """A mix of document lengths, or a size, that cannot be sampled."""


class ModelError(DistcaError):
    """A model's folder that cannot be used, or holds a model that is not served."""

    next_step = "give the folder of a model that is served, or correct what is named."


class KernelError(DistcaError):
    """A core-attention kernel that was asked for cannot run here."""


class TransportError(DistcaError):
    """A transport that was asked for cannot be used here, or an exchange does not fit its memory."""


class SupportError(DistcaError):
    """A model, or a way of running it, that core attention disaggregation does not serve."""


class VersionError(DistcaError):
    """A package that is needed is missing, or of a version that is not supported."""

    next_step = "install such a version into the environment that this runs in."


class ConfigError(DistcaError):
    """A setting that no run can be started with."""

    next_step = "change the setting that is named and start again."

    def __init__(self, message: str, next_step: str | None = None) -> None:
        super().__init__(message)
        self.next_step = next_step or self.next_step


class LaunchError(ConfigError):
    """An environment, a machine or a Slurm job that a launcher cannot start ranks with."""

    next_step = "change it and start again; docs/environment.md lists every variable."


class OptionError(DistcaError):
    """An option that no command can work with."""

    next_step = "change the option that is named and start again."


class BaselineError(ConfigError):
    """A mode that cannot run here; the message says why and what to change."""


class CheckpointError(DistcaError):
    """A checkpoint that could not be written; raised on every rank."""

    next_step = "make room or let the output folder be elsewhere; then resume from the last checkpoint before."


class DamagedCheckpointError(ConfigError):
    """A checkpoint that is not any more what was saved."""

    next_step = "resume an older run, or start anew."


class StuckCheckpointError(DistcaError):
    """An old checkpoint that cannot be deleted."""

    next_step = "see above why; let this user write there, then start again."


class DivergedError(ConfigError):
    """A loss or gradient that is no number any more; raised on every rank before anything of the step is saved."""

    next_step = "lower the learning rate or warm up longer, and resume from the last checkpoint."


def system_words(error: OSError) -> str:
    """Returns the system's words on a file that failed, without the number and the path of Python's message."""
    if isinstance(error, FileExistsError):  # of a folder to be made, where "File exists" alone misleads
        return f"{error.filename} is no folder"
    return error.strerror or str(error)
