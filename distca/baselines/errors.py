"""Errors for requests that a baseline cannot serve."""

from distca.errors import ConfigError


class BaselineError(ConfigError):
    """A mode that cannot run here; the message says why and what to change."""
