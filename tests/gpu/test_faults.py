"""A fault of one of two GPUs ends both ranks within ten seconds, with a sentence that names who failed.

``DISTCA_RESULTS=folder`` keeps the seconds of every fault in folder/gpu_faults.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.transport.select import why_not_nvshmem
from tests.gpu.runs import keep_results, settings_line
from tests.train.faults import Ended, run_with_fault

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.alone]

AT_ONCE = 4
"""Runs; most of their time they start."""
LONGEST_S = 10.0


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        fault: of tests.train.faults.
        says: what standard error has, of how many ranks.
        by: so many.
        where: rank and step of the fault.
        settings: beside the small ones.
        trains_on: the run does not end.
    """

    fault: str
    says: tuple[str, ...]
    by: int
    where: tuple[int | str, int] = (1, 3)
    settings: tuple[tuple[str, Any], ...] = ()
    trains_on: bool = False

    @property
    def needs_nvshmem(self) -> bool:
        return self.fault in ("nvshmem", "settings")


_NVSHMEM = ("cad.transport", "nvshmem")
CASES = {
    "exception": Case("exception", ("Rank 1 failed in step 3 on ", "RuntimeError: the fault of the test"), by=2),
    "SIGKILL": Case("killed", (r"Rank 1 died in step 3 \(process \d+",), by=1),
    "out of memory": Case("memory", ("Rank 1 failed in step 3 on ", "(OutOfMemoryError|can't allocate memory)"), by=2),
    "NVSHMEM starts on one rank only": Case(
        "nvshmem", ("NVSHMEM does not start on rank 1: .*the fault of the test", "cad.transport"), by=1, where=(1, 0)
    ),
    "NVSHMEM starts nowhere, cad.transport nvshmem": Case(
        "nvshmem",
        ("cad.transport nvshmem cannot be used here: on rank 0, it does not start: .*the fault of the test",),
        by=1,
        where=("0,1", 0),
        settings=(_NVSHMEM,),
    ),
    "NVSHMEM starts nowhere, cad.transport auto": Case(
        "nvshmem",
        ("Transport: nccl over 2 ranks", "NVSHMEM is here but does not start, so rows go by nccl: on rank 0"),
        by=1,
        where=("0,1", 0),
        settings=(("train.steps", 3),),
        trains_on=True,
    ),
    "symmetric memory too small": Case(
        "settings",
        (r"\(cad.nvshmem_buffer_gb\) gives 0.001 GiB",),
        by=1,
        where=(1, 1),
        settings=(_NVSHMEM, ("cad.nvshmem_buffer_gb", 0.001)),
    ),
}


def run_case(folder: Path, name: str, gpus: bool = True, line: list[str] | None = None) -> Ended:
    """Train with the fault of a case.

    Args:
        folder: of the run; made.
        name: of the case.
        gpus: whether ranks have them.
        line: settings, if not the small ones of GPUs.
    """
    case = CASES[name]
    folder.mkdir()
    if line is None:
        line = settings_line({"output": folder, "train.steps": 1000, "train.micro_batches": 1} | dict(case.settings))
    rank, step = case.where
    return run_with_fault(folder, case.fault, *line, rank=rank, step=step, gpus=gpus)


def check(name: str, ended: Ended) -> str:
    """The sentence that a case's ranks end with; AssertionError if they do not end as they should."""
    case = CASES[name]
    first, *others = case.says
    saying = [said for said in ended.said if re.search(first, said)]
    everything = "\n".join([*ended.said, ended.launcher])
    assert len(saying) >= case.by, everything
    assert all(re.search(words, said) for said in saying for words in others), everything
    assert (ended.code == 0) == case.trains_on, everything
    if not case.trains_on:
        assert 0 < ended.seconds <= LONGEST_S, f"{ended.seconds:.1f} s\n{everything}"
    found = re.search(f".*{first}.*", saying[0])
    assert found
    return found[0].strip()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """Every case's run, some at a time; what their checks leave in KEPT is written at the end."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    folder, reason = tmp_path_factory.mktemp("faults"), why_not_nvshmem()
    names = [name for name, case in CASES.items() if reason is None or not case.needs_nvshmem]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = pool.map(lambda number: run_case(folder / str(number), names[number]), range(len(names)))
        yield dict(zip(names, ended, strict=True))
    keep_results("faults", 2, {"runs_at_once": AT_ONCE, "faults": KEPT})


KEPT: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_one_gpu_ends_all_with_its_words(runs: dict[str, Ended], name: str) -> None:
    if name not in runs:
        pytest.skip(f"no NVSHMEM: {why_not_nvshmem()}")
    ended = runs[name]
    seconds = None if CASES[name].trains_on else round(ended.seconds, 1)
    KEPT[name] = {"seconds_to_the_end_of_all": seconds, "code": ended.code}
    KEPT[name]["says"] = check(name, ended)
