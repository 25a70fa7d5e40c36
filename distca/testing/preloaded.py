"""The process that ranks are forked from imports this module, and by it all modules whose names a variable has.

Garbage is not collected meanwhile: imports make none, and looking for it takes a third of their time.
"""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress

NAMES = "DISTCA_PRELOADED"
"""The variable: names of modules with commas between them. A module that is not there is left to who needs it."""


def import_all(names: str) -> None:
    """Imports the modules that ``names`` has."""
    gc.disable()
    for name in names.split(","):
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # no process that is forked, nor this one at its end, looks at what was imported
    gc.enable()


if NAMES in os.environ:
    import_all(os.environ.pop(NAMES))
