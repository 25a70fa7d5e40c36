"""Writes a step that the planner fails on into a file, with which the failure can be repeated anywhere."""

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
    """Writes the step to a file if planning it, in the block, raises any error but a refusal.

    Args:
        inputs: the inputs of the plan.
        number: number of the step, for the message and the file's name.
        folder: the folder of the file; if it cannot be written there, it goes into the one for temporary files.

    Raises:
        FailedPlanError: planning failed; the message names the step, the file and the command.
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
