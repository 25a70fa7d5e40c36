"""Python programs, run as from the command line, in processes forked from one that has imported Megatron-Core already.

Importing it takes seconds in every rank, and most tests of the command line ask what a run says and leaves behind.
torchrun is the real one, with forked ranks. What a program imports, and how Python itself ends, needs a real start.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch

from distca.testing.ranks import collect_seldom, forked

ROOT = Path(__file__).parents[2]
TORCHRUN = ("torch.distributed.run", "distca.cluster.torchrun")
PIDS = "FORKED_RANKS"
"""Variable that names a folder: each rank leaves a file there, which is named by its rank and holds its process."""


class Program:
    """A program that runs: what tests and torchrun use of subprocess.Popen.

    Args:
        words: a Python, which is not looked at, and what it gets: ``-m module``, or a file, and arguments.
        env: all variables; None are those of this process.
        cwd: folder to run in; None is that of this process.
        stdout: file for what it says; None is this process's.
        stderr: the same for errors.
        start_new_session: it always does.
        target: what runs the program in the forked process: :func:`run_program`, or what calls it.
    """

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        start_new_session: bool = True,
        target: Callable[..., None] | None = None,
    ) -> None:
        streams = [
            Connection(os.dup(number if file is None else file.fileno()), readable=False)
            for number, file in ((1, stdout), (2, stderr))
        ]
        words = [str(word) for word in args[1:]]
        variables = dict(os.environ if env is None else env)
        self._process = forked(target or run_program, words, variables, str(cwd or Path.cwd()), *streams)
        # The exit code comes through a pipe. Of two threads that ask at once, one would find the pipe's end: code 255.
        # A signal's handler may ask amid a question of its own thread.
        self._asking = threading.RLock()
        self.args, self.pid = args, self._process.pid
        assert self.pid is not None
        for stream in streams:
            stream.close()

    @property
    def returncode(self) -> int | None:
        with self._asking:
            return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(*words: str, cwd: Path = ROOT, timeout: float = 180.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, on CPUs.

    Args:
        words: what Python gets.
        cwd: folder to run in.
        timeout: seconds.
        variables: of the environment, beside this process's.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was ended.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | variables
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = Program([sys.executable, *words], env=environment, cwd=cwd, stdout=out, stderr=err)
        try:
            program.wait(timeout)
        except subprocess.TimeoutExpired:
            program.terminate()  # torchrun ends its ranks
            wait([program._process.sentinel], 30)
            program.kill()
            raise
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read())
    return subprocess.CompletedProcess(program.args, program.wait(), *said)


def torchrun(ranks: int, *words: str, **others: Any) -> subprocess.CompletedProcess[str]:
    """:func:`run`, on so many ranks of this machine; ``words`` may begin with options of torchrun."""
    return run("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *words, **others)


def run_program(
    words: list[str], environment: dict[str, str], folder: str, stdout: Connection, stderr: Connection
) -> None:
    """Runs a program in this process, which ends with it."""
    os.setsid()
    for number, stream in ((1, stdout), (2, stderr)):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if PIDS in environment and "RANK" in environment:
        Path(environment[PIDS], environment["RANK"]).write_text(str(os.getpid()))
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    collect_seldom()
    code = 0
    try:
        _interpret(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)  # noqa: T201
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _interpret(words: list[str]) -> None:
    """Python's own command line, as far as tests and torchrun use it."""
    while words[0] in ("-u", "-W"):
        if words[0] == "-W":
            warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[1 + (words[0] == "-W") :]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, os.getcwd())
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    if words[0] != "-m":
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv = words[1:]
    sys.path.insert(0, os.getcwd())
    if words[1] in TORCHRUN:
        _fork_ranks()
    sys.modules.pop(words[1], None)  # it becomes __main__
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def _fork_ranks() -> None:
    """Let torchrun, in this process, fork its ranks from where this process was forked from."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    subprocess_handler.Popen = Program  # type: ignore[misc,assignment]
    # For a debug message it looks at every module that is imported, and this process has thousands of them.
    dynamic_rendezvous.get_method_name = str  # type: ignore[assignment]
