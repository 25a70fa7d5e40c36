"""What a user can get wrong about data, as a sentence."""


class DataError(ValueError):
    """Data or data settings that cannot be used; the message names the value, the limit and the setting to change."""


def system_words(error: OSError) -> str:
    """What the system says, without the number and the path of Python's message."""
    if isinstance(error, FileExistsError):  # of a folder to be made, where "File exists" alone misleads
        return f"{error.filename} is no folder"
    return error.strerror or str(error)
