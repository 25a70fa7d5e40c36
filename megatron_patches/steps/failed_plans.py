"""Writes a file of a step whose planning failed, so that ``distca plan`` can repeat the failure on any machine.

The file has the documents' lengths and the planner's options, but no token ids.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distca.errors import DistcaError, FailedPlanError
from distca.plan.step_file import StepInputs, write_step

logger = logging.getLogger(__name__)


@contextmanager
def reporting_failure(inputs: StepInputs, number: int, folder: Path) -> Iterator[None]:
    """Writes the step's file if the ``with`` block raises an unexpected error. A DistcaError passes unchanged.

    Args:
        folder: the file's folder. If the file cannot be written there, it goes to the system's temporary folder.

    Raises:
        FailedPlanError: planning failed; the message names the step and, if written, the file.
    """
    try:
        yield
    except DistcaError:
        raise
    except Exception as error:
        documents, tokens = sum(map(len, inputs.lengths)), int(sum(sum(map(int, each)) for each in inputs.lengths))
        what = f"Step {number}, of {documents:,} documents and {tokens:,} tokens, could not be planned ({error!r})"
        path = _written(inputs, f"failed_plan_of_step_{number}.json", folder)
        if path is None:
            raise FailedPlanError(f"{what}. The step's file could not be written; see the log.") from error
        raise FailedPlanError(
            f"{what}. {path} has the step's lengths and options; `distca plan {path}` plans the step again. Please "
            "report the error with that file, which holds no token ids."
        ) from error


def _written(inputs: StepInputs, name: str, folder: Path) -> Path | None:
    """Returns the absolute path of the written file; None if the inputs fit no file or no folder."""
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            write_step(place / name, inputs)
            return (place / name).absolute()
        except (OSError, TypeError) as error:
            logger.warning("%s could not be written: %s", place / name, error)
    return None
