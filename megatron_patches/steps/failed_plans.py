"""A step that the planner fails on is written into a file, with which its failure can be repeated anywhere."""

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
    """Write the step where planning it raises anything but a sentence.

    Args:
        inputs: what it is planned from.
        number: of the step, for the message and the file's name.
        folder: where the file goes; where it cannot be written, into the one for temporary files.

    Raises:
        FailedPlanError: it failed; names the step, the file and the command.
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
            raise FailedPlanError(f"{what}, nor could its lengths be written.") from error
        raise FailedPlanError(
            f"{what}. {path} has its lengths and options; `distca plan {path}` plans it again. Please report it with "
            "that file, which holds no token ids."
        ) from error


def _written(inputs: StepInputs, name: str, folder: Path) -> Path | None:
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            write_step(place / name, inputs)
            return (place / name).absolute()
        except (OSError, TypeError) as error:
            logger.warning("%s could not be written: %s", place / name, error)
    return None
