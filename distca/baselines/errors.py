"""What a user can ask of a baseline that it cannot do."""

from distca.errors import ConfigError


class BaselineError(ConfigError):
    """A mode that cannot run here; the message says why and what to change."""
