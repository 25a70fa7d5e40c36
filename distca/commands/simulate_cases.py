"""The cases of ``distca simulate``: every number of GPUs with every context and every mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from distca.baselines import BaselineError
from distca.commands.simulate_results import Timeline
from distca.simulate import Job, Workload
from distca.simulate.sweep import run_mode


def run_cases(
    jobs: Mapping[int, Job],
    contexts: Sequence[int],
    modes: Sequence[str],
    draw: Callable[[Job, int], list[Workload]],
    timeline: Timeline | None = None,
) -> list[dict[str, Any]]:
    """Predict all cases, with a progress bar on standard error.

    Args:
        jobs: by number of GPUs.
        contexts: longest documents.
        modes: names, as :func:`run_mode` takes them.
        draw: gives the documents of a job with a context; modes share them.
        timeline: written of the first case that can run.

    Returns:
        The figures of every case, or ``refused``, a sentence, where its mode does not fit.

    Raises:
        SimulationError: no degree of a sweep fits into memory.
    """
    from rich.console import Console
    from rich.progress import track

    drawn = cache(lambda gpus, context: draw(jobs[gpus], context))
    found: list[dict[str, Any]] = []
    cases = list(product(jobs, contexts, modes))
    for gpus, context, mode in track(cases, description="Simulating", console=Console(stderr=True), transient=True):
        workloads = drawn(gpus, context)
        try:
            outcome = run_mode(jobs[gpus], mode, workloads, (timeline.rank,) if timeline else ())
        except BaselineError as error:
            found.append({"gpus": gpus, "context": context, "mode": mode, "refused": str(error)})
            continue
        if timeline:
            timeline.write(outcome.spans)
            timeline = None
        found.append({"gpus": gpus, "context": context, **outcome.figures()})
    return found
