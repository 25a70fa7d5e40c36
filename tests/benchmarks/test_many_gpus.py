"""The programme for four and eight GPUs: every command can be started, and every part takes at most ten minutes."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import many_gpus, pipeline
from benchmarks.throughput.__main__ import asked_of


@pytest.mark.parametrize("gpus", [4, 8])
def test_every_command_can_be_started(gpus: int) -> None:
    runs = many_gpus.runs_of(gpus)
    assert max(Counter(run.name for run in runs).values()) == 1
    for run in runs:
        words = run.words(Path("out") / run.name)
        if run.benchmark == "benchmarks.throughput":
            settings = asked_of(words, gpus)
            assert settings.output.resolve().parent == Path("out").resolve()
        elif run.benchmark == "benchmarks.pipeline":
            assert pipeline.arguments_of(words).ranks == gpus
    seconds: Counter[str] = Counter()
    for run in runs:
        seconds[run.part] += run.seconds
    assert max(seconds.values()) <= many_gpus.PART_S, seconds
