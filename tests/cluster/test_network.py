"""Two nodes with a network between them, which is slow, and which is cut in the middle of a step."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distca.testing.nodes import why_not
from tests.testing.forked_nodes import ForkedNodes
from tests.testing.programs import Program
from tests.train.small_runs import ROOT, arguments, steps_of, write_texts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=f"no nodes: {why_not()}")]
# Ranks wait this long for signs of life once the link is cut; until then as long as users' ranks do, since a rank that
# shares two cores with other tests may be silent for seconds.
_LOST_S = 6.0
_IMPATIENT = f"""
import pathlib, sys, threading, time
from distca.cluster import health
from distca.train.run.main import main

def become_impatient(cut=pathlib.Path(sys.argv.pop(1))):
    while not cut.exists():
        time.sleep(0.1)
    health._LOST_S = {_LOST_S}

threading.Thread(target=become_impatient, daemon=True).start()
main()
"""


def _train(nodes: ForkedNodes, folder: Path, node: int, **settings: Any) -> Program:
    """One rank on a node, which counts others as lost after a few seconds once the file `cut` is there."""
    rank = {"RANK": str(node), "WORLD_SIZE": str(len(nodes.names)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": nodes.address(0), "MASTER_PORT": "29511", "CUDA_VISIBLE_DEVICES": ""}
    rank |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    chosen = {"output": folder, "name": "run", "data__path": folder / "texts", "train__steps": 10_000} | settings
    command = [sys.executable, "-c", _IMPATIENT, str(folder / "cut"), *arguments(**chosen)]
    return nodes.start(node, command, rank, cwd=ROOT, stderr=(folder / f"log{node}").open("w"))


@pytest.mark.timeout(250)
def test_a_link_that_is_cut_in_a_step_ends_both_sides_with_a_sentence(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    with ForkedNodes(2, megabits=50) as nodes:
        ranks = [_train(nodes, tmp_path, node) for node in range(2)]
        end = time.monotonic() + 150
        while not (tmp_path / "run/metrics.jsonl").exists() or max(steps_of(tmp_path / "run"), default=0) < 3:
            assert time.monotonic() < end and all(rank.poll() is None for rank in ranks), _logs(tmp_path)
            time.sleep(0.2)
        nodes.cut(1)
        (tmp_path / "cut").touch()
        cut = time.monotonic()
        codes = [rank.wait(120) for rank in ranks]
        seconds = time.monotonic() - cut
    first, second = ((tmp_path / f"log{node}").read_text() for node in range(2))
    assert 0 not in codes, _logs(tmp_path)
    assert "No sign of life from ranks 1 on node1" in first, first
    assert "the node or its network is gone" in second, second
    assert seconds < _LOST_S + 54, "40 s and what is said then must be over within a minute; other work runs here too"


def _logs(folder: Path) -> str:
    return "\n".join((folder / f"log{node}").read_text() for node in range(2))
