"""A training run in which one rank meets a fault: ``python -m tests.train.faults FAULT RANK STEP SETTING ...``."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.testing.programs import ROOT, torchrun

STACKS_S = 12
"""Until a rank that is still there after the fault says where its threads are, for whoever looks for the reason."""


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        code: its exit code.
        seconds: from the fault to the end of all ranks.
        said: standard error of each rank.
        launcher: standard error of torchrun.
    """

    code: int
    seconds: float
    said: list[str]
    launcher: str


def run_with_fault(
    folder: Path, fault: str, *line: str, ranks: int = 2, rank: int | str = 1, step: int = 3, gpus: bool = False
) -> Ended:
    """Train until a rank meets a fault in a step; on GPUs, or on CPU ranks. NVSHMEM may fail on several: "0,1"."""
    logs, at = folder / f"logs-{fault}", folder / f"at-{fault}"
    words = ["--redirects=2", f"--log-dir={logs}", "-m", "tests.train.faults", fault, str(rank), str(step), *line]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": paths, "FAULT_AT": str(at)}
    if gpus:
        command = [sys.executable, "-m", "distca.cluster.torchrun", "--standalone", f"--nproc_per_node={ranks}", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=180)
    else:
        done = torchrun(ranks, *words, **variables)
    said = [next(logs.glob(f"*/attempt_0/{number}/stderr.log")).read_text() for number in range(ranks)]
    return Ended(done.returncode, time.time() - float(at.read_text()) if at.exists() else -1, said, done.stderr)


def _fail(_: Any) -> NoReturn:
    raise RuntimeError("the fault of the test")


def _send_what_does_not_fit(_: Any) -> NoReturn:
    from distca.errors import TransportError

    raise TransportError("An exchange does not fit its memory; raise it.")


def _exit(_: Any) -> NoReturn:
    sys.exit(3)


def _is_told_to_end(_: Any) -> None:
    """While the checkpoint of the step before is still being written, if there is one."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3)  # steps of this size are over before anybody looked at signals


def _is_killed(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _has_no_memory(loop: Any) -> None:
    """In the middle of backward, as it happens. The fault is that torch gives up, which takes it a while on a GPU."""

    def ask(do: Any, *_: Any) -> Any:
        try:
            return do.new_empty(1 << 50)
        finally:
            _note()

    loop._trainer.cad.pool.kernel.backward = ask


def _is_only_noted(_: Any) -> None:
    """What the settings lead to."""


FAULTS: dict[str, Callable[[Any], None]] = {
    "exception": _fail,
    "transport": _send_what_does_not_fit,
    "exit": _exit,
    "told": _is_told_to_end,
    "killed": _is_killed,
    "memory": _has_no_memory,
    "settings": _is_only_noted,
    "nvshmem": _is_only_noted,
}


def _note() -> None:
    Path(os.environ["FAULT_AT"]).write_text(str(time.time()))


def _break_nvshmem(ranks: str) -> None:
    """NVSHMEM does not start on these ranks; the others wait for them inside."""
    import nvshmem.core

    def fail(*_: Any, **__: Any) -> NoReturn:
        _note()
        raise RuntimeError("the fault of the test")

    if os.environ["RANK"] in ranks.split(","):
        nvshmem.core.init = fail


def main() -> None:
    """Train with the fault built in."""
    from distca.train.run import loop
    from distca.train.run.main import main as train
    from megatron_patches.checkpoint.writer import TorchWriter

    fault, rank, step = FAULTS[sys.argv[1]], *sys.argv[2:4]
    run_step, write = loop._Loop._step, TorchWriter.write

    def write_slowly(self: TorchWriter) -> None:
        time.sleep(1)
        write(self)

    def meet(self: Any, number: int, ahead: Any) -> dict[str, Any]:
        if number == int(step):
            faulthandler.dump_traceback_later(STACKS_S)
            if os.environ["RANK"] == rank:
                _note()
                fault(self)
        return run_step(self, number, ahead)

    if sys.argv[1] == "nvshmem":
        _break_nvshmem(rank)
    elif fault is _is_told_to_end:
        TorchWriter.write = write_slowly  # type: ignore[method-assign]
    loop._Loop._step = meet  # type: ignore[method-assign]
    train(sys.argv[4:])


if __name__ == "__main__":
    main()
