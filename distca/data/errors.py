"""What a user can get wrong about data, as a sentence."""


class DataError(ValueError):
    """Data or data settings that cannot be used; the message names the value, the limit and the setting to change."""
