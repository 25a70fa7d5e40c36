"""The cases of ``distca simulate``: every number of GPUs with every context and every mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

from distca.commands.simulate_results import Timeline
from distca.errors import BaselineError, SimulationError
from distca.simulate import Job, Workload
from distca.simulate.sweep import run_mode
from distca.words import rename_parameters


def run_cases(
    jobs: Sequence[Job],
    contexts: Sequence[int],
    modes: Sequence[str],
    draw: Callable[[Job, int], list[Workload]],
    timeline: Timeline | None = None,
) -> list[dict[str, Any]]:
    """Predict all cases, with a progress bar on standard error.

    Args:
        jobs: one for each number of GPUs.
        contexts: longest documents.
        modes: names, as :func:`run_mode` takes them.
        draw: gives the documents of a job with a context; modes share them.
        timeline: written of the first case that can run.

    Returns:
        The figures of every case, or ``refused``, a sentence, where its documents or its mode do not fit.

    Raises:
        BaselineError, SimulationError: no case fits; what refused the first one.
    """
    from rich.console import Console
    from rich.progress import track

    @cache
    def drawn(number: int, context: int) -> list[Workload] | SimulationError:
        try:
            return draw(jobs[number], context)
        except SimulationError as error:
            return error

    found: list[dict[str, Any]] = []
    refusals: list[BaselineError | SimulationError] = []
    cases = list(product(range(len(jobs)), contexts, modes))
    for number, context, mode in track(cases, description="Simulating", console=Console(stderr=True), transient=True):
        job, workloads = jobs[number], drawn(number, context)
        case = {"gpus": job.cluster.gpus, "context": context}
        try:
            if isinstance(workloads, SimulationError):
                raise workloads
            outcome = run_mode(job, mode, workloads, (timeline.rank,) if timeline else ())
        except (BaselineError, SimulationError) as error:
            said = rename_parameters(str(error), "--{}".format)
            found.append({**case, "mode": mode, "refused": said})
            refusals.append(error)
            continue
        if timeline:
            timeline.write(outcome.spans)
            timeline = None
        found.append({**case, **outcome.figures()})
    if len(refusals) == len(found):
        raise refusals[0]
    return found
